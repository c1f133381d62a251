"""What the doctor makes of what its process tells, and of how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from pat_vllm.doctor import run
from pat_vllm.doctor.child import ChildResult
from pat_vllm.doctor.report import Check
from pat_vllm.doctor.request import REQUEST, Request
from pat_vllm.doctor.run import examine, explain

FINE = {"check": {"name": "host", "found": "it is"}}
DIED = "ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: {}), shutting down"


def ended(
    patch: pytest.MonkeyPatch, told: list[dict[str, Any]], end: ChildResult
) -> tuple[list[Check], tuple[str, ...], dict[str, str]]:
    """Checks, the log, and the environment of a process that tells and ends so."""
    request, found, variables = Request(2, "mixture"), list[Check](), dict[str, str]()

    def run_module(module: str, text: str, given: Any, on_event: Any, _: float) -> ChildResult:
        assert module.endswith("examination") and REQUEST.validate_json(text) == request
        variables.update(given)
        for event in told:
            on_event(event)
        return end

    patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    patch.setattr(run, "run_module", run_module)
    log = examine(request, lambda name: None, found.append)
    return found, log, variables


def test_a_process_that_has_answered_may_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    found, log, variables = ended(monkeypatch, [FINE], ChildResult(-6, "a log", True))
    assert found == [Check("host", "it is")] and not log
    # Engines may compile, and their cores have processes of their own.
    assert "TORCHDYNAMO_DISABLE" not in variables
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


@pytest.mark.parametrize(
    ("code", "why"), [(3, "ended with exit code 3"), (None, "it hangs: nothing for 420 s")]
)
def test_a_process_that_ends_before_its_check_does(
    code: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = [FINE, {"doing": "layout tp1dp2"}]
    (_, last), _, _ = ended(monkeypatch, told, ChildResult(code, ""))
    assert last.name == "layout tp1dp2" and why in (last.problem or "")


def test_what_the_log_says_comes_before_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    check = {"name": "start", "problem": "EngineDeadError: it died\nmore", "seconds": 3.0}
    end = ChildResult(1, f"first\n{DIED.format(-9)}" + "\nits end" * 39)
    (last,), log, _ = ended(monkeypatch, [{"check": check}], end)
    why = "rank 1 died, exit code -9 (EngineDeadError: it died)"
    assert last == Check("start", problem=why, seconds=3.0)
    assert len(log) == 40 and log[0] == DIED.format(-9)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (DIED.format(-9), "rank 1 died, exit code -9"),
        (DIED.format(None), "rank 1 died"),
        # It has ended by itself: why is told elsewhere.
        (DIED.format(0), None),
        ("RayWorkerProc rank=2 died unexpectedly, shutting", "rank 2 died"),
        (
            f"{DIED.format(1)}\nValueError: To serve at least one request, more",
            "too little memory: To serve at least one request, more",
        ),
        ("all is well", None),
    ],
)
def test_last_words_are_explained(log: str, cause: str | None) -> None:
    assert explain(log) == cause

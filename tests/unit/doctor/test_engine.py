"""What the doctor asks of an engine, and that each answer is compared."""

from __future__ import annotations

import json
import sys
from io import StringIO
from itertools import count
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from pat_vllm.doctor import engine as module
from pat_vllm.doctor.child import Events
from pat_vllm.doctor.compare import Comparison, Differs
from pat_vllm.doctor.engine import PATEngine, StockEngine, Task, run_checks
from pat_vllm.layout import Layout
from pat_vllm.reporting import DraftCounts, DraftSample
from tests.unit.doctor.test_compare import REFERENCE

AS_USED = Task(
    {"model": "first"}, "other", ((1, 2),), (REFERENCE, REFERENCE), (2, 0), as_used="all of it"
)


def check(patch: pytest.MonkeyPatch, wrong: int | None = None) -> tuple[Any, int, bool]:
    """Go through the checks; the answer of the n-th comparison is wrong.

    Returns:
        The engine, how many comparisons there were, and whether all checks have passed.
    """
    numbers, events = count(), Events()
    engine = PATEngine(AS_USED, events)

    def compare(*_: Any) -> Comparison:
        if next(numbers) == wrong:
            raise Differs("wrong token")
        return Comparison(1, 0, 0.0)

    for name in ("by_policy", "in_layout", "across", "with_drafts"):
        patch.setattr(engine, name, compare)
    engine.llm, engine.layouts = MagicMock(), [Layout.of(tp, 2) for tp in (1, 2)]
    patch.setattr(engine, "start", str)
    patch.setattr(PATEngine, "on_cpu", True)
    patch.setattr(module, "switch_to", lambda *_: None)
    patch.setattr(module, "send_by_ipc", lambda llm, model, _: llm.ipc(model) and "IPC")
    passed = run_checks(engine.checks(), events)
    return engine.llm, next(numbers), passed


def test_every_answer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, comparisons, passed = check(monkeypatch)
    assert passed and comparisons == 1 + 2 + 2 + 1 + 2 + 2
    for number in range(comparisons):
        assert not check(monkeypatch, number)[2]


def test_lost_weights_are_replaced_before_the_kv_cache_wakes_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, _, _ = check(monkeypatch)
    assert llm.method_calls == [
        call.sleep(level=2),
        call.wake_up(["weights"]),
        call.collective_rpc("reload_weights", kwargs={"weights_path": "other"}),
        call.wake_up(["kv_cache"]),
        call.reset_prefix_cache(),
        call.ipc("first"),
        call.reset_prefix_cache(),
        call.llm_engine.engine_core.shutdown(),
    ]


def test_rounding_is_known_before_anything_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of tensor parallelism 2 gives the first of stock vLLM's tokens another score."""
    engines: list[dict[str, Any]] = []

    def llm(**engine: Any) -> MagicMock:
        engines.append(engine)
        return MagicMock()

    monkeypatch.setitem(sys.modules, "vllm", MagicMock(LLM=llm))
    monkeypatch.setattr(module, "generate", lambda *_, **__: REFERENCE.outputs)
    scores = [REFERENCE.forced, ((-0.1, -0.23), (-1.0,)), REFERENCE.forced]
    monkeypatch.setattr(module, "score", lambda *_: scores[len(engines) - 1])
    engine = StockEngine(Task({"model": "first"}, "other", ((1, 2),), rounding_tp=2), Events())
    assert run_checks(engine.checks(), Events())
    assert [options["model"] for options in engines] == ["first", "first", "other"]
    assert [options.get("tensor_parallel_size") for options in engines] == [None, 2, None]
    assert [reference.rounding for reference in engine.references] == pytest.approx([0.03, 0.03])


def test_the_first_check_that_fails_is_the_last() -> None:
    def fails() -> str:
        raise RuntimeError("no")

    events = Events()
    assert not run_checks([("fine", lambda: "it is"), ("wrong", fails), ("late", str)], events)
    assert isinstance(events.file, StringIO)
    doing, fine, _, wrong = map(json.loads, events.file.getvalue().splitlines())
    assert doing == {"doing": "fine"}
    assert (fine["check"]["found"], fine["check"]["problem"]) == ("it is", None)
    assert wrong["check"]["problem"] == "RuntimeError: no" and wrong["last"]


@pytest.mark.parametrize("drafted", [0, 8])
def test_drafts_that_were_never_made_are_no_success(
    drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All responses may have ended before a draft length was asked for."""
    engine = PATEngine(AS_USED, Events())
    engine.llm, engine.layouts = MagicMock(), [Layout.of(2, 2)]
    drafts = [DraftSample(0.0, Layout.of(2, 2), 0, 2, 1, DraftCounts(0, 0))]
    monkeypatch.setattr(module, "switch_to", lambda *_: None)
    monkeypatch.setattr("pat_vllm.api.speculate", lambda llm, k: None)
    monkeypatch.setattr("pat_vllm.api.report", lambda llm: MagicMock(drafts=list(drafts)))

    def generate(after: Any) -> Any:
        if drafted:
            drafts.append(DraftSample(1.0, Layout.of(2, 2), 0, 2, 1, DraftCounts(drafted, 4)))
            after[1]()
        return REFERENCE.outputs

    monkeypatch.setattr(engine, "generate", generate)
    if drafted:
        assert engine.with_drafts().startswith("k = 2: 4 of 8 accepted"), "of those asked for"
    else:
        with pytest.raises(RuntimeError, match="before the engine drafted"):
            engine.with_drafts()

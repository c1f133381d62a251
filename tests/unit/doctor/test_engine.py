"""What the doctor asks of an engine, and that each answer is compared."""

from __future__ import annotations

import json
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from pat_vllm.doctor import engine as module
from pat_vllm.doctor import examination
from pat_vllm.doctor.child import Events
from pat_vllm.doctor.compare import Comparison, Differs
from pat_vllm.doctor.engine import PATEngine
from pat_vllm.doctor.examination import Examination, run_checks
from pat_vllm.doctor.report import Unfit
from pat_vllm.doctor.request import Request
from pat_vllm.layout import Layout
from pat_vllm.reporting import DraftCounts, DraftSample
from tests.unit.doctor.test_compare import REFERENCE

ENGINE = {
    "enable_sleep_mode": True,
    "speculative_config": {"num_speculative_tokens": 2},
    "additional_config": {"pat": {"policy": {"kind": "schedule"}}},
}


def pat_engine() -> PATEngine:
    return PATEngine(ENGINE, ((1, 2),), (REFERENCE, REFERENCE), Path("other"), Events())


def check(patch: pytest.MonkeyPatch, wrong: int | None = None) -> tuple[Any, int, bool]:
    """Go through the checks; the answer of the n-th comparison is wrong.

    Returns:
        The engine, how many comparisons there were, and whether all checks have passed.
    """
    numbers, engine = count(), pat_engine()

    def compare(*_: Any) -> Comparison:
        if next(numbers) == wrong:
            raise Differs("wrong token")
        return Comparison(1, 0, 0.0)

    for name in ("by_policy", "in_layout", "across", "with_drafts"):
        patch.setattr(engine, name, compare)
    engine.llm, engine.layouts = MagicMock(), [Layout.of(tp, 2) for tp in (1, 2)]
    patch.setattr(engine, "start", str)
    patch.setattr(PATEngine, "on_cpu", False)
    patch.setattr(module, "switch_to", lambda *_: None)
    passed = run_checks(engine.checks(), engine.events)
    return engine.llm, next(numbers), passed


def test_every_answer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the policy, in two layouts, across both pairs, with drafts, after sleep, after an update
    in two layouts."""
    _, comparisons, passed = check(monkeypatch)
    assert passed and comparisons == 1 + 2 + 2 + 1 + 1 + 2
    for number in range(comparisons):
        assert not check(monkeypatch, number)[2]


def test_lost_weights_are_replaced_before_the_kv_cache_wakes_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, _, _ = check(monkeypatch)
    assert llm.method_calls == [
        call.sleep(level=1),
        call.wake_up(),
        call.sleep(level=2),
        call.wake_up(["weights"]),
        call.collective_rpc("reload_weights", kwargs={"weights_path": "other"}),
        call.wake_up(["kv_cache"]),
        call.reset_prefix_cache(),
        call.llm_engine.engine_core.shutdown(),
    ]


@pytest.mark.parametrize(
    ("graphs", "given", "fits"),
    [(3, {}, True), (0, {}, False), (0, {"enforce_eager": True}, True)],
)
def test_graphs_that_were_not_captured_are_no_success(
    graphs: int, given: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = pat_engine()
    engine.engine = {**ENGINE, **given}
    llm = MagicMock()
    llm.collective_rpc.return_value = [(5, "FULL", "FLASH_ATTN"), (graphs, "FULL", "FLASH_ATTN")]
    monkeypatch.setattr(module, "start", lambda _: llm)
    monkeypatch.setattr("pat_vllm.api.report", lambda llm: MagicMock(layouts=[Layout.of(2, 2)]))
    assert run_checks([("start", engine.start)], engine.events) == fits
    assert isinstance(engine.events.file, StringIO)
    assert f"cudagraph_mode FULL, {graphs} graphs a rank" in engine.events.file.getvalue()


@pytest.mark.parametrize(
    ("options", "on_cpu"), [({}, False), ({"kv_cache_dtype": "fp8_e5m2"}, True)]
)
def test_rounding_is_known_before_anything_is_compared(
    options: dict[str, Any], on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of tensor parallelism 2 gives the first of stock vLLM's tokens another score, in 16
    bits or with KV in 8."""
    engines: list[dict[str, Any]] = []

    def start(engine: dict[str, Any]) -> MagicMock:
        engines.append(engine)
        return MagicMock()

    monkeypatch.setattr(examination, "start", start)
    monkeypatch.setattr(examination, "machine_checks", lambda ranks: ())
    monkeypatch.setattr(examination, "generate", lambda *_, **__: REFERENCE.outputs)
    monkeypatch.setattr(PATEngine, "checks", lambda self: iter([("ours", str)]))
    scores = [REFERENCE.forced, ((-0.1, -0.23), (-1.0,)), REFERENCE.forced]
    monkeypatch.setattr(examination, "score", lambda *_: scores[len(engines) - 1])
    examined = Examination(Request(2), Path("of"), Events())
    request = Request(2, engine=options)
    examined.engine, examined.prompts = request.with_pat("of/weights", on_cpu), ((1, 2),)
    for name in ("make_models", "options"):
        monkeypatch.setattr(examined, name, str)
    assert run_checks(examined.checks(), examined.events)
    assert [options["model"] for options in engines] == ["of/weights"] * 2 + ["of/new-weights"]
    assert [options.get("tensor_parallel_size") for options in engines] == [None, 2, None]
    assert [reference.rounding for reference in examined.references] == pytest.approx([0.03, 0.03])


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
    engine = pat_engine()
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
        with pytest.raises(Unfit, match="before the engine drafted"):
            engine.with_drafts()

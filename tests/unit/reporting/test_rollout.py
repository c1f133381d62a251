"""The line that trainers log after each rollout."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pat_vllm.reporting import (
    BatchReport,
    ControlComparison,
    DraftCounts,
    DraftSample,
    PredictorReport,
    RefusedSwitch,
    Report,
    text,
)
from pat_vllm.reporting.text import describe, describe_awaited
from tests.unit.reporting.samples import ONE, TWO, switch_report

REFUSED = RefusedSwitch(22.0, ONE, TWO, "no room", "asleep")
FAILED = RefusedSwitch(23.0, ONE, TWO, "KeyError('r1')", "planning_failed")
QUIET = Report(ONE, (ONE, TWO), (), (), ())
SWITCHES = (
    switch_report(13.0, seconds=0.02),
    switch_report(23.0, seconds=0.02),
    switch_report(25.0, TWO, ONE, "idle", 0),
    switch_report(33.5, ONE, TWO, "forced", 2, 0.02),
)
BATCHES = (BatchReport(19.0, 9.0, 8, 90, 0, True), BatchReport(21.0, 1.0, 8, 90))
CONTROL = BatchReport(21.5, 1.5, 8, 90, control=True)


def drafts(*counts: tuple[float, int, int, int]) -> dict[str, Any]:
    samples = (
        DraftSample(at, ONE, 0, k, 7, DraftCounts(drafted, right))
        for at, k, drafted, right in counts
    )
    return {"drafts": tuple(samples)}


@pytest.mark.parametrize(
    ("happened", "text"),
    [
        (
            {"switches": SWITCHES, "refused": (REFUSED,)},
            "tp1dp2 -> tp2dp1 at 3.00 s, 4 live, 20 ms; "
            "tp1dp2 -> tp2dp1 at 13.50 s, 2 live, 20 ms; 1 refused",
        ),
        (
            {"switches": SWITCHES[:1], "predictor": PredictorReport(batches=3, responses=48)},
            "no switch; learnt from 48 responses in 3 batches",
        ),
        ({"refused": (REFUSED, FAILED, FAILED)}, "no switch; 1 refused, 2 failed to plan"),
        ({"batches": BATCHES}, "no switch"),
        (
            {"batches": (*BATCHES, CONTROL), "control": ControlComparison(2, 0.9, 0.8, 1.0125)},
            "no switch; a control batch; batches that may switch take 0.900 (0.800 to 1.012) of "
            "the time per token of 2 control batches",
        ),
        (
            drafts((19.0, 4, 50, 50), (20.5, 4, 100, 30), (21.5, 0, 0, 0)),
            "no switch; k 0 to 4, mean 2.0, 30 of 100 draft tokens accepted",
        ),
    ],
)
def test_what_is_said_of_a_rollout(happened: dict[str, Any], text: str) -> None:
    said = describe(replace(QUIET, **happened), started=20.0, seconds=2.0, responses=8)
    assert said == f"8 responses in 2.00 s; {text}"


def test_a_rollout_does_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    async def arrives() -> Report:
        return replace(QUIET, switches=SWITCHES)

    async def fails() -> Report:
        raise RuntimeError("no engine")

    async def never_comes() -> Any:
        await asyncio.Event().wait()

    def said(report: Any) -> str:
        return asyncio.run(describe_awaited(report, 20.0, 2.0, 8)).partition("; ")[2]

    assert said(arrives()).startswith("tp1dp2 -> tp2dp1 at 3.00 s")
    assert said(fails()) == "no report of the engine: RuntimeError('no engine')"
    monkeypatch.setattr(text, "REPORT_SECONDS", 0.01)
    assert said(never_comes()) == "no report of the engine: TimeoutError()"

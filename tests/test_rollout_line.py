"""The line that trainers log after each rollout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pat_vllm.layout import Layout
from pat_vllm.reporting import (
    BatchSavings,
    BatchTimes,
    DraftSample,
    PredictorReport,
    RefusedSwitch,
    Report,
    SwitchReport,
    describe,
)

NARROW, WIDE = Layout(1, 2), Layout(2, 1)


def switch(at: float, source: Layout, target: Layout, reason: str, live: int) -> SwitchReport:
    parts: Any = dict.fromkeys(
        ("quiesce", "plan", "states", "kv", "weights", "activate", "rpc", "finish"), 0.0025
    )
    return SwitchReport(
        at=at,
        source=source,
        target=target,
        reason=reason,
        num_seqs=live,
        migrated=live,
        recomputed=0,
        kv_bytes=100 * live,
        seconds=0.02,
        **parts,
    )


REPORT = Report(
    layout=NARROW,
    layouts=(NARROW, WIDE),
    switches=(
        switch(13.0, NARROW, WIDE, "policy", 4),
        switch(15.0, WIDE, NARROW, "idle", 0),
        switch(23.5, NARROW, WIDE, "forced", 2),
    ),
    refused=(RefusedSwitch(22.0, NARROW, WIDE, "no room"),),
    timeline=(),
)


def test_what_happened_in_a_rollout() -> None:
    assert describe(REPORT, started=10.0, seconds=15.5, responses=16) == (
        "16 responses in 15.50 s; tp1dp2 -> tp2dp1 at 3.00 s, 4 live, 20 ms; "
        "tp1dp2 -> tp2dp1 at 13.50 s, 2 live, 20 ms; 1 refused"
    )


def test_only_what_is_new_counts() -> None:
    learnt = Report(
        layout=NARROW,
        layouts=(NARROW, WIDE),
        switches=REPORT.switches,
        refused=REPORT.refused,
        timeline=(),
        predictor=PredictorReport(batches=3, responses=48),
    )
    assert describe(learnt, started=30.0, seconds=1.0, responses=8) == (
        "8 responses in 1.00 s; no switch; learnt from 48 responses in 3 batches"
    )


def test_failures_to_plan_are_told_apart() -> None:
    failed = RefusedSwitch(23.0, NARROW, WIDE, "KeyError('r1')", expected=False)
    for refused, told in (
        ((*REPORT.refused, failed, failed), "1 refused, 2 failed to plan"),
        ((failed,), "1 failed to plan"),
    ):
        report = replace(REPORT, switches=(), refused=refused, errors=7)
        assert describe(report, started=20.0, seconds=1.0, responses=8) == (
            f"8 responses in 1.00 s; no switch; {told}"
        )


def test_what_was_saved_in_the_rollout() -> None:
    def saved(at: float, predicted: BatchTimes, *realised: float) -> BatchSavings:
        return BatchSavings(at, NARROW, predicted, BatchTimes(*realised))

    def line(*savings: BatchSavings) -> str:
        report = replace(REPORT, switches=(), refused=())
        return describe(replace(report, predictor=PredictorReport(savings=savings)), 20.0, 2.0, 8)

    before = saved(19.0, BatchTimes(9.0, 1.0, 1.0), 9.0, 1.0, 1.0)
    both = saved(21.0, BatchTimes(5.0, 4.3, 3.3), 5.0, 4.4, 3.35)
    assert line(before, both) == (
        "8 responses in 2.00 s; no switch; saved 12% by layouts, 21% by drafts "
        "over tp1dp2 without drafts (estimated; predicted 14%, 20%)"
    )
    # Where there were no drafts there is nothing to tell of them; what loses is negative.
    switched = saved(22.0, BatchTimes(5.0, 4.5, 4.5), 5.0, 5.2, 5.2)
    assert line(switched).endswith(
        "; saved -4% by layouts over tp1dp2 without drafts (estimated; predicted 10%)"
    )
    assert line(both, switched).endswith(
        "; saved 4% by layouts, 11% by drafts "
        "over tp1dp2 without drafts (estimated; predicted 12%, 10%)"
    )
    # Without either it saves nothing.
    assert line(saved(22.0, BatchTimes(5.0, 4.5, 4.5), 5.0, 5.0, 5.0)).endswith("no switch")
    assert line(before).endswith("no switch")


def test_drafts_of_the_rollout() -> None:
    def drafts(at: float, drafted: int, accepted: int) -> DraftSample:
        return DraftSample(at, NARROW, 0, 4, 7, drafted, accepted)

    report = replace(
        REPORT,
        switches=(),
        refused=(),
        drafts=(drafts(19.0, 50, 50), drafts(20.5, 100, 30), drafts(21.5, 60, 12)),
    )
    assert describe(report, started=20.0, seconds=2.0, responses=8) == (
        "8 responses in 2.00 s; no switch; k 4, 42 of 160 draft tokens accepted"
    )
    changing = replace(
        report,
        drafts=(drafts(20.5, 100, 30), replace(drafts(21.5, 0, 0), num_speculative_tokens=0)),
    )
    assert describe(changing, started=20.0, seconds=2.0, responses=8) == (
        "8 responses in 2.00 s; no switch; k 0 to 4, mean 2.0, 30 of 100 draft tokens accepted"
    )
    # With a draft length of 0 there is nothing to tell.
    nothing = replace(report, drafts=(drafts(20.5, 0, 0),))
    assert describe(nothing, started=20.0, seconds=2.0, responses=8) == (
        "8 responses in 2.00 s; no switch"
    )

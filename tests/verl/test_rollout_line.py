"""The line that is logged after each rollout."""

from __future__ import annotations

import pytest

pytest.importorskip("pat_verl")

from pat_verl.rollout import Rollout

from pat_vllm.layout import Layout
from pat_vllm.reporting import LayoutSteps, LiveSample, PredictorReport, Report, SwitchReport

NARROW, WIDE = Layout(1, 2), Layout(2, 1)


def switch(at: float, source: Layout, target: Layout, reason: str, live: int) -> SwitchReport:
    return SwitchReport(
        at, source, target, reason, live, live, 0, 100, 0.02, *[0.0025] * 8, first_step=0.01
    )


FIRST = Report(
    layout=NARROW,
    layouts=(NARROW, WIDE),
    switches=(
        switch(3.0, NARROW, WIDE, "policy", 4),
        switch(5.0, WIDE, NARROW, "idle", 0),
    ),
    refused=(),
    timeline=(LiveSample(1.0, NARROW, 16), LiveSample(3.0, NARROW, 4), LiveSample(4.0, WIDE, 1)),
    steps={NARROW: LayoutSteps(50, 0.5, 0.01), WIDE: LayoutSteps(30, 0.3, 0.01)},
    predictor=PredictorReport(batches=1, responses=16),
)
SECOND = Report(
    layout=NARROW,
    layouts=(NARROW, WIDE),
    switches=FIRST.switches,
    refused=(),
    timeline=(*FIRST.timeline, LiveSample(7.0, NARROW, 8)),
    steps={NARROW: LayoutSteps(75, 0.8, 0.01), WIDE: LayoutSteps(30, 0.3, 0.01)},
    predictor=PredictorReport(batches=2, responses=24),
)


def test_the_first_rollout() -> None:
    assert str(Rollout.between(None, FIRST)) == (
        "1 switch in 0.020 s (1x2 -> 2x1 at 4 live); at most 16 live; steps 1x2: 50, 2x1: 30; "
        "lengths learnt from 1 batches, 16 responses"
    )


def test_a_later_rollout_counts_what_is_new() -> None:
    rollout = Rollout.between(FIRST, SECOND)
    assert rollout.switches == ()
    assert rollout.peak == 8
    assert rollout.steps == {NARROW: 25}
    assert rollout.batches == 2


def test_nothing_happened() -> None:
    assert Rollout.between(SECOND, SECOND).peak == 0

"""What layouts and drafts saved: the arithmetic, and against batches that were really done so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.modelled.hardware import modelled_profile
from pat_vllm.predictor import savings as savings_module
from pat_vllm.predictor.forecast import BatchForecast
from pat_vllm.predictor.planner import Planner
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.predictor.savings import Interval, Savings, Snapshot, in_step
from pat_vllm.predictor.state import Floats
from pat_vllm.reporting import BatchSavings, BatchTimes
from pat_vllm.simulator import shapes
from pat_vllm.simulator.ground_truth import ReplayedGroundTruth
from pat_vllm.simulator.simulate import simulate_batches
from tests.unit.predictor.examples import (
    batches,
    policy_of,
    switch_report,
    two_ranks,
)

ONE, TWO = Layout(1, 2), Layout(2, 1)
LENGTHS = (0, 1, 2, 4)


def pace(layout: Layout, live: Any, context: Any) -> Any:
    """Seconds in which every live request gets a token; linear, so that means are exact."""
    return 0.01 / layout.tp + 0.002 * live + 1e-7 * context


class Known(Planner):
    """A model that is right."""

    def __init__(self) -> None:
        self.layouts = (ONE, TWO)

    def token_seconds(
        self, layout: Layout, forecast: BatchForecast, draft_yield: Any = None
    ) -> Floats:
        return np.asarray(pace(layout, forecast.live, forecast.context))


@dataclass(frozen=True)
class Part:
    """An interval to be.

    Attributes:
        stall: seconds of a switch to `layout` at its beginning; None for no switch.
        left: requests that are left at its end.
        tokens: that each request gets.
        faster: what drafts make of a token's time; None for no drafts.
        arrivals: whether a request with a long prompt arrives in it.
    """

    layout: Layout = ONE
    stall: float | None = None
    left: int = 8
    tokens: int = 100
    faster: float | None = None
    arrivals: bool = False


def replayed(parts: Sequence[Part], slower: float = 1.0) -> tuple[BatchSavings, BatchTimes]:
    """What is estimated for a batch of these parts, and what is true.

    Args:
        slower: than its model the engine is.
    """
    savings, now, generated, live, length = Savings(Known()), 5.0, 0, 8, 20.0
    fixed = switching = 0.0
    savings.arrived()
    for part in parts:
        left = 0 if part is parts[-1] else min(part.left, live)
        begin = Snapshot(
            now, part.layout, live, round(live * length), round(length), generated, prompt=1e6
        )
        if part.stall is None:
            savings.observe(begin)
        else:
            source = ONE if part.layout == TWO else TWO
            savings.observe(replace(begin, layout=source))
            stall = {"seconds": part.stall + 0.5, "quiesce": 0.5}
            savings.switched(switch_report(source, part.layout, **stall))
            now += part.stall
            switching += part.stall
        mean = 0.5 * (live + max(1, left))
        tokens = part.tokens * 2  # times a mean that may be half a request, a whole number
        context = mean * (length + 0.5 * tokens)
        plain = tokens * pace(part.layout, mean, context) * slower
        real = plain * (part.faster or 1.0)
        savings.drafted(0)
        if part.faster is not None:
            savings.drafted(4)
        if part.arrivals:
            savings.arrived()
            fixed += real
            switching += real
        else:
            fixed += plain if part.layout == ONE else tokens * pace(ONE, mean, context)
            switching += plain
        now += real
        generated += round(mean * tokens)
        length += tokens
        live = left
    savings.end(now, generated)
    (record,) = savings.records.since()
    return record, BatchTimes(fixed, switching, now - 5.0)


PARTS = st.builds(
    Part,
    layout=st.sampled_from([ONE, TWO]),
    stall=st.sampled_from([None, 0.25]),
    left=st.integers(1, 8),
    tokens=st.integers(1, 200),
    faster=st.none() | st.floats(0.2, 1.5),
    arrivals=st.booleans(),
)
ALL = [
    Part(),
    Part(faster=0.7, left=6),
    Part(TWO, 0.25, 4),
    Part(TWO, None, 2, faster=0.5),
    Part(TWO, None, 2, arrivals=True, faster=0.5),
    Part(ONE, 0.25, 1, faster=0.8),
]


def close_to(times: BatchTimes) -> BatchTimes:
    """Equal but for contexts, which are counted in whole tokens."""
    names = BatchTimes.__dataclass_fields__
    about: dict[str, Any] = {name: pytest.approx(getattr(times, name), rel=1e-3) for name in names}
    return BatchTimes(**about)


@settings(max_examples=60)
@given(st.lists(PARTS, min_size=1, max_size=6), st.sampled_from([3, 20_000]))
@example(ALL, 3)
@example(ALL, 20_000)
def test_by_a_model_that_is_right_the_estimate_is(parts: list[Part], fold: int) -> None:
    """Also where intervals are folded on the way."""
    with patch.object(savings_module, "_FOLD", fold):
        record, truth = replayed([replace(parts[0], stall=None), *parts[1:]])
    assert record.layout == ONE
    assert record.realised == close_to(truth)


def test_nothing_is_saved_by_nothing_whatever_the_model_says() -> None:
    times = replayed([Part(left=5), Part(left=2)], slower=3.0)[0].realised
    assert times.fixed == times.switching == times.drafting
    assert times.saved_by_layouts == times.saved_by_drafts == 0.0
    # Where no draft was asked for, none saved anything.
    times = replayed([Part(left=5), Part(TWO, 0.25, 2)], slower=3.0)[0].realised
    assert times.switching == times.drafting


def test_what_is_not_counted() -> None:
    """Many prompts, a layout that a user asked for, batches without a plan."""
    savings = Savings(Known())
    savings.end(1.0, 0)
    assert not savings.records.since()

    def switch(reason: str = "policy") -> None:
        savings.switched(switch_report(ONE, TWO, reason=reason, seconds=0.75, quiesce=0.5))

    for reason, prompts in (("policy", 900), ("forced", 0)):
        savings.observe(Snapshot(1.0, ONE, 8, 800, 100, 0, prompts))
        switch(reason)
        savings.end(3.0, 800)
        last = savings.records.since()[-1]
        assert last.realised == BatchTimes(1.75, 2.0, 2.0), "but for the switch as it was"
    assert [record.at for record in savings.records.since(3.0)] == [3.0, 3.0]
    for prompt, counts in ((300.0, True), (500.0, False), (math.inf, False)):
        savings.observe(Snapshot(1.0, ONE, 8, 800, 100, 0, prompt=prompt))
        switch()
        for _ in range(2):
            savings.arrived()
        savings.end(3.0, 800)
        assert (savings.records.since()[-1].realised.fixed != 1.75) == counts
    # The engine was paused.
    savings.observe(Snapshot(1.0, ONE, 8, 800, 100, 0))
    switch()
    savings.interrupted()
    savings.end(5.0, 800)
    assert savings.records.since()[-1].realised == BatchTimes(3.75, 4.0, 4.0)
    # Everybody was aborted before the next step ended.
    savings.observe(Snapshot(5.0, ONE, 8, 800, 100, 0))
    savings.end(3.0, 0)
    assert (savings.records.since()[-1].at, savings.records.since()[-1].realised.drafting) == (
        5.0,
        0.0,
    )
    assert not savings.records.since(5.1)


def test_the_prediction_is_of_the_most_requests() -> None:
    savings = Savings(Known())
    looks = [
        Snapshot(float(number), ONE, live, 100, 20, 0) for number, live in enumerate((4, 8, 8, 6))
    ]
    assert [savings.observe(observe) for observe in looks] == [True, True, False, False]
    savings.end(9.0, 0)
    assert savings.observe(Snapshot(10.0, ONE, 2, 100, 20, 0)), "of the next batch"


def test_tokens_come_where_as_many_are_live() -> None:
    # Three are live for 10 tokens, two for 20 and one for 70.
    parts = [
        Interval(ONE, 1.0, 0.0, True, True, t, m, 9, 9) for t, m in ((5, 3), (15, 3), (9, 1.4))
    ]
    assert [part.tokens for part in in_step(parts, [10, 30, 100])] == [2.5, 7.5, 90.0]
    assert in_step([], [10]) == []


# In batches


@pytest.mark.parametrize("name", ["long tail", "short", "straggler"])
def test_estimates_of_simulated_batches(name: str) -> None:
    """Against the same batches in the layout in which they began, under the same truth."""
    profile = two_ranks()
    truth = ReplayedGroundTruth(profile)
    policy = policy_of(profile)
    ours = simulate_batches(batches(name), policy, truth, profile)
    static = simulate_batches(batches(name), StayPolicy(profile.layouts[0]), truth, profile)
    records = policy.report().savings
    assert len(records) == len(ours)
    for record, run, fixed in zip(records, ours, static, strict=True):
        saved = 1 - run.generation_seconds / fixed.generation_seconds
        assert record.layout == profile.layouts[0]
        assert record.realised.saved_by_layouts == pytest.approx(saved, abs=0.05)
        assert record.realised.saved_by_drafts == 0.0
        assert record.realised.drafting == pytest.approx(run.generation_seconds, rel=0.1)
    # Lengths are learnt from batch to batch.
    expected = pytest.approx(records[-1].realised.saved_by_layouts, abs=0.12)
    assert records[-1].predicted.saved_by_layouts == expected


def test_estimates_of_simulated_batches_with_drafts() -> None:
    """Requests advance at paces of their own there, so that other ones are left at the end."""
    profile = modelled_profile("llama-3.1-8b", "H100", 4, draft_lengths=LENGTHS[1:])
    policy = policy_of(profile, bound=2048, draft_lengths=LENGTHS)
    truth = ReplayedGroundTruth(profile)
    trace = replace(shapes.uniform(64, 1000, 2048, 2048, seed=0), acceptance=0.5)
    ours = simulate_batches([trace, trace], policy, truth, profile)
    fixed = simulate_batches([trace], StayPolicy(profile.layouts[0]), truth, profile)[0]
    for run, record in zip(ours, policy.report().savings, strict=True):
        saved = 1 - run.generation_seconds / fixed.generation_seconds
        times = record.realised
        assert times.saved_by_drafts > 0.1
        assert 1 - times.drafting / times.fixed == pytest.approx(saved, abs=0.03)
        assert times.fixed == pytest.approx(fixed.generation_seconds, rel=0.05)

"""What a switch costs, and the way that its requests' KV takes: one model says both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.models.kinds import FullAttention, LinearAttention, SlidingWindow
from pat_vllm.predictor.cost import CostModel
from pat_vllm.profile import Profile, StepSample, StepShape, SwitchSample
from pat_vllm.reporting import SwitchReport
from tests.unit.predictor.examples import decode, profile_of, switch_report, switch_sample

LAYOUTS = ONE, TWO, FOUR = tuple(Layout.of(tp, 4) for tp in (1, 2, 4))


def make_profile(
    switches: Iterable[SwitchSample] = (), prefill: Mapping[Layout, float] | None = None
) -> Profile:
    """`prefill`: seconds for 100 prompt tokens in each replica, by layout."""
    steps = [StepSample.of(layout, decode(1), [0.01]) for layout in LAYOUTS]
    for layout, seconds in (prefill or {}).items():
        steps.append(
            StepSample.of(layout, StepShape(0, 0, 0, 100, busy=layout.replicas), [seconds])
        )
    return profile_of(LAYOUTS, steps, switches)


def report(
    num_seqs: int = 4, tokens: int = 4000, migrated: int | None = None, **values: Any
) -> SwitchReport:
    migrated = num_seqs if migrated is None else migrated
    values = {"seconds": 1.0, "kv": 0.5, "kv_bytes": 1 << 24 if migrated else 0} | values
    switch = switch_report(ONE, FOUR, num_seqs=num_seqs, tokens=tokens, migrated=migrated, **values)
    return replace(switch, recomputed=num_seqs - migrated)


def linear(
    source: Layout, target: Layout, fixed: float, per_request: float, per_token: float
) -> list[SwitchSample]:
    """Samples of a switch that is exactly linear."""
    return [
        switch_sample(source, target, n, t, fixed + per_request * n + per_token * t)
        for n, t in ((0, 0), (1, 100), (8, 800), (8, 8000), (32, 3200))
    ]


positive = st.floats(1e-7, 1e-2)


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    """Models from rates, from profiles, from both, all of them with some switches observed."""
    rates = draw(positive), {layout: draw(positive) for layout in LAYOUTS if draw(st.booleans())}
    model = CostModel("auto", *rates) if draw(st.booleans()) else CostModel()
    if draw(st.booleans()):
        switches = [
            sample
            for source, target in ((ONE, FOUR), (FOUR, ONE), (ONE, TWO))
            if draw(st.booleans())
            for sample in linear(source, target, draw(positive), draw(positive), draw(positive))
        ]
        prefill = {layout: draw(positive) for layout in LAYOUTS if draw(st.booleans())}
        model.fit(make_profile(switches, prefill))
    for _ in range(draw(st.integers(0, 3))):
        num_seqs = draw(st.integers(1, 9))
        switch = report(
            num_seqs,
            draw(st.integers(1, 100_000)),
            draw(st.integers(0, num_seqs)),
            seconds=draw(st.floats(1e-4, 10)),
            kv=draw(st.floats(1e-5, 1)),
            kv_bytes=draw(st.sampled_from([100, 1 << 24])),
        )
        model.observe(switch)
    return model


@given(models(), st.permutations(LAYOUTS), st.lists(st.integers(0, 50_000), min_size=1))
def test_requests_are_carried_as_predicted(
    model: CostModel, layouts: list[Layout], tokens: list[int]
) -> None:
    """The way that each request is given is the one whose cost is in the prediction, for arrays as
    for numbers."""
    source, target, _ = layouts
    num_seqs = len(tokens)
    predicted = model.seconds(source, target, num_seqs, sum(tokens))
    ways = {model.choose(n, source, target, num_seqs) for n in tokens}
    assert len(ways) == 1, "both ways are linear in a request's tokens"
    many = np.array([1.0, num_seqs, 64.0]), np.array([10.0, sum(tokens), 1e6])
    alone = [model.seconds(source, target, *each) for each in zip(*many, strict=True)]
    assert model.seconds(source, target, *many).tolist() == pytest.approx(alone)
    seconds = {}
    for mode in ("migrate", "recompute"):
        model.mode = mode  # type: ignore[assignment]
        assert {model.choose(n, source, target, num_seqs) for n in tokens} == {mode}
        seconds[mode] = model.seconds(source, target, num_seqs, sum(tokens))
    assert seconds[ways.pop()] == pytest.approx(predicted)
    assert predicted == pytest.approx(min(seconds.values()))


def test_rates_measured_at_start_decide_without_a_profile() -> None:
    rates = 1000 / 1e7, {ONE: 1 / 5e3, TWO: 1 / 1e4, FOUR: 1 / 2e4}
    model = CostModel("auto", *rates)
    # 2e-4 s a token in one replica of tp 1, of which four work side by side.
    assert model.choose(100, FOUR, ONE, num_seqs=1) == "migrate"
    assert model.choose(100, FOUR, ONE, num_seqs=4) == "recompute"
    assert model.choose(100, ONE, FOUR, num_seqs=400) == "recompute"  # 5e-5 s, in the one there is
    assert CostModel().choose(100, FOUR, ONE, 4) == "migrate", "nothing is known"


def test_carried_prefixes_are_no_cost_of_the_requests() -> None:
    """As many tokens in as much time teach the same, whoever had them."""
    alone, beside = (CostModel("auto", 1e-5) for _ in range(2))
    alone.observe(report(tokens=4000))
    beside.observe(report(tokens=1000, cached_tokens=3000))
    assert alone.seconds(ONE, FOUR, 4, 500) == beside.seconds(ONE, FOUR, 4, 500)


def test_exchanges_correct_the_rates() -> None:
    model = CostModel("auto", 1e-6, {FOUR: 1e-5})
    assert model.choose(1000, ONE, FOUR, 4) == "migrate"
    slow = report(tokens=4000, kv=0.08, seconds=9.0)  # 2e-5 s a token; the rest is no KV
    model.observe(replace(slow, kv_bytes=1000))
    assert model.choose(1000, ONE, FOUR, 4) == "migrate", "so few bytes show the latency"
    model.observe(slow)
    assert model.choose(1000, ONE, FOUR, 4) == "recompute"
    assert model.choose(1000, TWO, FOUR, 4) == "migrate", "another pair of layouts"


def test_a_profile_is_taken_in_place_of_the_rates() -> None:
    model = CostModel("auto", 1.0, dict.fromkeys(LAYOUTS, 1e-9))
    switches = linear(ONE, FOUR, 0.01, 1e-4, 1e-6) + linear(FOUR, ONE, 0.02, 2e-4, 5e-6)
    model.fit(make_profile(switches, prefill={FOUR: 1e-3, ONE: 1e-3}))  # 1e-5 s a token
    assert model.seconds(ONE, FOUR, 10, 1000) == pytest.approx(0.01 + 1e-3 + 1e-3, rel=1e-3)
    assert model.choose(100, ONE, FOUR, 10) == "migrate"
    assert model.choose(100, FOUR, ONE, 10) == "recompute"  # in four replicas side by side
    assert model.seconds(FOUR, ONE, 10, 1000) == pytest.approx(0.02 + 2e-3 + 2.5e-3, rel=1e-3)
    # The pair that it lacks takes the most expensive of the others, and tp 2 the rate at start.
    assert model.choose(100, ONE, TWO, 10) == "recompute"
    assert model.seconds(ONE, TWO, 10, 1000) == pytest.approx(0.02 + 2e-3, rel=1e-3)


def test_switches_correct_a_profile() -> None:
    model = CostModel("migrate").fit(make_profile(linear(ONE, FOUR, 0.1, 0.01, 1e-4)))
    expected = model.seconds(ONE, FOUR, 4, 4000)
    model.observe(report(seconds=2 * expected + 3.0, quiesce=3.0))
    assert model.seconds(ONE, FOUR, 4, 4000) == pytest.approx(2 * expected)
    model.observe(report(seconds=expected))
    assert model.seconds(ONE, FOUR, 4, 4000) == pytest.approx(2**0.5 * expected)
    model.observe(report(migrated=2, seconds=100.0))  # neither way's cost
    model.observe(report(0, 0, seconds=100.0))
    assert model.seconds(ONE, FOUR, 4, 4000) == pytest.approx(2**0.5 * expected)
    model.observe(report(seconds=1e6))
    assert model.seconds(ONE, FOUR, 4, 4000) < 21 * expected


def test_a_slow_switch_does_not_end_migration_for_good() -> None:
    """A switch that recomputes shows everything but the KV, so that the model recovers."""
    profile = make_profile(linear(ONE, FOUR, 0.1, 0.01, 1e-4), prefill={FOUR: 0.02})
    model = CostModel().fit(profile)
    usual = 0.1 + 4 * 0.01
    model.observe(report(seconds=15 * (usual + 0.4)))
    assert model.choose(1000, ONE, FOUR, 4) == "recompute"
    for _ in range(6):
        model.observe(report(migrated=0, seconds=usual))
    assert model.choose(1000, ONE, FOUR, 4) == "migrate"


def test_of_a_window_less_moves_than_is_computed_again() -> None:
    """A token moves in two seconds, and is computed again in one."""
    kinds = (SlidingWindow(1, 16, 1, window=100),)
    model = CostModel("auto", 2.0, {FOUR: 1.0}, kinds)
    assert [model.choose(tokens, ONE, FOUR, 1) for tokens in (50, 190, 230, 9000)] == [
        *("recompute", "recompute", "migrate", "migrate")
    ]
    assert model.seconds(ONE, FOUR, 1.0, 50.0) == pytest.approx(50)
    assert model.seconds(ONE, FOUR, 3.0, 3 * 9000.0) == pytest.approx(3 * 2 * 104, rel=0.1)
    samples = [
        sample.model_copy(update={"num_seqs": n, "tokens": 1000 * n, "seconds": 1.0 + 2 * n * 104})
        for sample, n in zip(linear(ONE, FOUR, 1.0, 0.0, 0.0), (1, 2, 4, 8, 16), strict=True)
    ]
    model.fit(make_profile(samples))
    assert model.seconds(ONE, FOUR, 2.0, 2 * 4000.0) == pytest.approx(1 + 2 * 2 * 104, rel=0.1)


def test_a_state_moves_whole_and_its_context_is_computed_whole() -> None:
    """As 300 tokens more, so that short requests are computed again and long ones migrate."""
    kinds = (FullAttention(2, 16, 10), LinearAttention(16, 16, slot_bytes=3000))
    model = CostModel("auto", 1.0, {FOUR: 2.0}, kinds)
    assert model.choose(100, ONE, FOUR, 1) == "recompute"
    assert model.choose(1000, ONE, FOUR, 1) == "migrate"
    assert model.seconds(ONE, FOUR, 1, 100) == pytest.approx(200, rel=0.01)
    assert model.seconds(ONE, FOUR, 1, 1000) == pytest.approx(1300, rel=0.01)
    assert model.seconds(ONE, FOUR, 10, 10_000) == pytest.approx(13_000, rel=0.01)
    always = CostModel("migrate", 1.0, {FOUR: 2.0}, kinds)
    assert always.seconds(ONE, FOUR, 10, 1000) == pytest.approx(4000, rel=0.01)

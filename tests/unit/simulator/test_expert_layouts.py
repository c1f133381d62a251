"""Layouts that differ only in how experts lie: from a profile's file to a simulated run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pat_vllm.layout import Layout
from pat_vllm.modelled.hardware import measured_noise
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.cost import CostModel
from pat_vllm.predictor.forecast import forecast
from pat_vllm.predictor.planner import Planner
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profile import Profile, StepSample
from pat_vllm.simulator import shapes
from pat_vllm.simulator.ground_truth import ReplayedGroundTruth
from pat_vllm.simulator.simulate import simulate, simulate_batches
from tests.unit.predictor import examples
from tests.unit.predictor.examples import decode, live_requests
from tests.unit.simulator.simple import follow

LAYOUTS = ONE, CUT, SPREAD = Layout(1, 2), Layout(2, 1), Layout(2, 1, "ep")
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def step_seconds(layout: Layout, batch: float) -> float:
    """One request is served fastest by cut experts, some by spread ones, many by replicas."""
    if layout == ONE:
        return 0.015 + 0.0004 * batch
    return 0.008 + 0.001 * batch if layout == CUT else 0.0105 + 0.0005 * batch


def profile_of(
    seconds: Callable[[Layout, float], float] = step_seconds,
    layouts: tuple[Layout, ...] = LAYOUTS,
    switch_seconds: float = 1e-4,
) -> Profile:
    """A profile of steps without noise; contexts cost nothing."""
    steps = (
        StepSample.of(layout, decode(batch, each, busy), [seconds(layout, batch)] * 3)
        for layout in layouts
        for busy in {1, layout.replicas}
        for batch in BATCHES
        for each in (64, 512)
    )
    switches = (
        examples.switch_sample(source, target, live, 100 * live, switch_seconds)
        for source, target in itertools.permutations(layouts, 2)
        for live in (0, 8)
    )
    return examples.profile_of(layouts, steps, switches)


PROFILE = profile_of()


# ---------------------------------------------------------------- what is predicted


def test_steps_of_each_kind_are_predicted() -> None:
    """Each kind has a residual of its own, which the linear base cannot tell from the other's."""

    def bent(layout: Layout, batch: float) -> float:
        sign = {ONE: 0, CUT: 1, SPREAD: -1}[layout]
        return (0.01 + 0.0005 * batch) * (1 + 0.3 * sign * (4 <= batch <= 16))

    profile = profile_of(bent)
    model = StepTimeModel.fit(profile)
    for sample in profile.steps:
        assert model.step(sample.layout, sample.shape) == pytest.approx(sample.seconds, rel=0.05)


def test_kv_stays_between_kinds() -> None:
    """It costs nothing where no switch between the kinds was measured."""
    model = CostModel("auto", 1e-3, dict.fromkeys(LAYOUTS, 1e-6))
    assert model.choose(100, ONE, SPREAD, 4) == "recompute"
    assert model.seconds(SPREAD, CUT, 4, 10**6) == 0.0 < model.seconds(ONE, CUT, 4, 10**6)

    model.fit(profile_of(layouts=(ONE, CUT), switch_seconds=0.5))
    for mode in ("migrate", "recompute"):
        model.mode = mode  # type: ignore[assignment]
        assert model.choose(100, CUT, SPREAD, 4) == "migrate"
        assert model.choose(100, ONE, SPREAD, 4) == mode
        assert model.seconds(CUT, SPREAD, 4, 400) == model.seconds(CUT, SPREAD, 4, 10**9)
    # Each kind has its own switches.
    model = CostModel().fit(profile_of(switch_seconds=0.5))
    model.observe(
        examples.switch_report(ONE, SPREAD, seconds=1.0, num_seqs=4, migrated=4, tokens=400)
    )
    assert model.seconds(ONE, SPREAD, 4, 400) == pytest.approx(1.0)
    assert model.seconds(ONE, CUT, 4, 400) == pytest.approx(0.5)


# ---------------------------------------------------------------- what is planned


def test_planner_takes_the_faster_kind_at_each_number_of_requests() -> None:
    planner = Planner(
        PROFILE.layouts,
        StepTimeModel.fit(PROFILE).seconds,
        lambda source, target, live, tokens: np.zeros(()),
        max_num_seqs=PROFILE.max_num_seqs,
        kv_tokens=PROFILE.kv_tokens,
    )
    fastest = {1: CUT, 3: CUT, 8: SPREAD, 12: SPREAD, 24: ONE, 64: ONE}
    for live in range(1, 65):
        layout_costs = planner.layout_costs(
            forecast(live_requests([100] * live), np.full((live, 4), 200))
        )
        (best,) = {layout_costs.plan(start).best for start in LAYOUTS}
        times = {layout: step_seconds(layout, max(1, live / layout.replicas)) for layout in LAYOUTS}
        assert times[best] <= 1.02 * min(times.values()), live
        assert best == fastest.get(live, best)


# ---------------------------------------------------------------- what is simulated


def test_switches_between_kinds_are_replayed() -> None:
    trace = shapes.uniform(24, 10, 200, 200, seed=0)
    policy = follow(ONE, (6, SPREAD), (12, CUT), (18, SPREAD))
    truth = ReplayedGroundTruth(PROFILE)
    run = simulate(trace, policy, truth, PROFILE)
    ends = [(switch.source, switch.target) for switch in run.switches]
    assert ends == [(ONE, SPREAD), (SPREAD, CUT), (CUT, SPREAD), (SPREAD, ONE)]
    assert run.tokens == sum(trace.lengths)
    assert run.prefilled == sum(trace.num_prompt_tokens), "no KV is lost"
    for switch in run.switches_on_the_way:
        assert switch.migrated == switch.num_seqs and not switch.recomputed
        assert (switch.kv_bytes == 0) == (switch.source.tp == switch.target.tp)
        assert switch.seconds - switch.quiesce == pytest.approx(1e-4, rel=0.01)
    for sample in PROFILE.steps:
        taken = truth.step_seconds(sample.layout, sample.shape, 0.0)
        assert taken == pytest.approx(sample.seconds, rel=0.01)
    # Noise of another engine, which has no mixture, is that of the nearest layout.
    noisy = ReplayedGroundTruth(PROFILE, measured_noise())
    assert simulate(trace, policy, noisy, PROFILE).seconds != run.seconds


def test_pat_uses_both_kinds_and_gains_by_it() -> None:
    truth = ReplayedGroundTruth(PROFILE)
    batches = [shapes.lognormal(64, 200, 1.0, 2000, seed) for seed in range(2)]

    def runs(profile: Profile) -> list[Any]:
        policy = AdaptivePolicy(profile, bound=2000, timer=lambda: 0.0)
        return simulate_batches(batches, policy, truth, PROFILE)

    ours = runs(PROFILE)
    assert {switch.target for run in ours[1:] for switch in run.switches} == {*LAYOUTS}
    seconds = sum(run.seconds for run in ours)
    for kinds in ((ONE, CUT), (ONE, SPREAD)):
        assert seconds < sum(run.seconds for run in runs(profile_of(layouts=kinds)))
    for layout in LAYOUTS:
        static = simulate_batches(batches, StayPolicy(layout), truth, PROFILE)
        assert seconds < sum(run.seconds for run in static)

"""Contexts that a simulated switch carries, against PAT's scheduler on the same trajectories.

Without workers: every step of a replica takes as long as any other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pat_vllm.layout import Layout
from pat_vllm.predictor.cost import Number
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.profile import StepShape
from pat_vllm.simulator.shapes import GENERATORS
from pat_vllm.simulator.simulated_engine import SimulatedEngine
from pat_vllm.simulator.traces import LengthTrace
from tests.unit.simulator.simple import capacity_of
from tests.vllm.scheduler.test_scheduler import results_of
from tests.vllm.simulator.arrivals import Arrivals
from tests.vllm.without_workers import BLOCK_SIZE, RANKS, pat_scheduler

SWITCHES = {60: 2, 120: 8, 200: 1, 260: 4, 330: 8, 420: 2}
"""Steps of the engine, and the tp to switch to then. It begins in tp=4."""
BLOCKS = {"room": 400, "short": 110}
"""Of a rank."""


class EqualSteps:
    """A step takes a second, a switch no time."""

    def step_seconds(self, layout: Layout, shape: StepShape, now: float, steps: int = 1) -> float:
        return float(steps)

    def switch_seconds(
        self, source: Layout, target: Layout, live: Number, tokens: Number
    ) -> Number:
        return 0 * live


@pytest.mark.parametrize("memory", BLOCKS)
def test_switches_carry_what_the_engine_carries(memory: str) -> None:
    """Contexts at each switch, prompt tokens that are computed in all, and how long it takes."""
    trace = GENERATORS["agents"](40, 1500, 3)
    trace = replace(trace, arrivals=tuple(float(round(5 * at)) for at in trace.arrivals))
    carried, prefilled, steps = of_scheduler(trace, BLOCKS[memory])
    simulated, computed, took = of_simulator(trace, BLOCKS[memory])
    assert sum(carried) > 1000, "the case is no test"
    short = memory == "short"  # where one that is evicted or not decides about later ones
    assert sum(simulated) == pytest.approx(sum(carried), rel=0.08)
    assert short or simulated == pytest.approx(carried, rel=0.03)
    assert computed == pytest.approx(prefilled, rel=0.08 if short else 0.01)
    assert took == pytest.approx(steps, rel=0.03)


def of_simulator(trace: LengthTrace, blocks: int) -> tuple[list[int], int, float]:
    room = {tp: (blocks * tp - 1) * BLOCK_SIZE for tp in (1, 2, 4, 8)}
    capacity = capacity_of(kv_tokens=room)
    policy = StayPolicy(Layout.of(4, RANKS))
    engine = SimulatedEngine(trace, EqualSteps(), capacity, policy, chunk=1)
    switches = dict(SWITCHES)
    while engine.num_seqs or engine.arriving:
        while switches and engine.now >= min(switches):
            engine.switch(Layout.of(switches.pop(min(switches)), RANKS), "forced")
        if not engine.num_seqs:
            engine.wait()
        engine.advance()
    report = engine.report()
    return [switch.cached_tokens for switch in report.switches], report.prefilled, engine.now


def of_scheduler(trace: LengthTrace, blocks: int) -> tuple[list[int], int, float]:
    scheduler = pat_scheduler(4, num_blocks=blocks)
    costs = scheduler.controller.costs
    costs.mode, costs.least_chance = "migrate", lambda *pair: 0.0
    arrivals = Arrivals(trace)
    steps = computed = 0
    while scheduler.has_unfinished_requests() or arrivals.waiting:
        for request in arrivals.until(steps):
            scheduler.add_request(request)
        if (tp := SWITCHES.get(steps)) is not None:
            assert scheduler.controller.request_switch(tp)
        steps += 1
        if not scheduler.has_unfinished_requests():
            continue
        output = scheduler.schedule()
        computed += sum(step.total_num_scheduled_tokens for step in output.steps.values())
        scheduler.update_from_output(output, results_of(output))
        arrivals.follow(steps)
    switches = scheduler.controller.report().switches
    carried = [switch.cached_tokens for switch in switches if switch.reason == "forced"]
    return carried, computed - sum(trace.lengths) + len(trace), steps

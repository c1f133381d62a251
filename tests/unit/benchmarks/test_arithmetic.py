"""Benchmarks: the clairvoyant, the judgement of runs, errors and growth, on known numbers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

import pytest

from benchmarks.bench.calibrated import CalibratedSimulator
from benchmarks.bench.judgement import judge
from benchmarks.bench.runs import PAT, Run
from benchmarks.endurance.growth import trend
from benchmarks.paired import Ratio, paired_ratio, turns
from benchmarks.rollouts.arithmetic import MODULUS, problem, solution
from benchmarks.rollouts.reward import graded
from benchmarks.simulated.clairvoyant import clairvoyant
from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import StepShape
from pat_vllm.reporting import DecisionReport
from pat_vllm.simulator.replay import simulate
from tests.unit.reporting.samples import ONE, TWO, decision_report, switch_report
from tests.unit.simulator.simple import FREE, LAYOUTS, Linear, batch, capacity_of, follow


def test_the_clairvoyant_is_hardly_worse_than_simple_schedules() -> None:
    """It takes requests for evenly spread, which a few long ones are not always."""
    ratios = []
    for seed in range(3):
        rng = random.Random(seed)
        trace = batch(*(min(400, round(rng.lognormvariate(4, 1.2)) + 1) for _ in range(24)))
        truth = Linear(0.6, 0.5)
        best = min(
            simulate(trace, follow(low, (ended, high)), truth, FREE).seconds
            for low, high in combinations(LAYOUTS, 2)
            for ended in range(1, len(trace))
        )
        ratios.append(clairvoyant(trace, LAYOUTS, truth, FREE).seconds / best)
    assert statistics.mean(ratios) < 1.03, ratios


@dataclass(frozen=True)
class Crossover:
    """Steps of one group take half as long as replicas' with up to 4 requests, else twice."""

    def step_seconds(self, layout: Layout, shape: StepShape, now: float, steps: int = 1) -> float:
        if layout == ONE:
            return 0.010
        return 0.005 if shape.batch <= 4 else 0.020

    def switch_seconds(self, source: Layout, target: Layout, live: Any, tokens: Any) -> Any:
        return 0.0 if source == target else 0.01


TAIL, EQUAL, LATE = ([10] * 12 + [100, 110]), [100] * 14, ([10] * 12 + [80, 100, 110])


def decision(at: float, live: int, why: str) -> DecisionReport:
    return replace(decision_report(at, why=why), num_seqs=live)


@pytest.mark.parametrize(
    ("lengths", "moves", "why", "wrong", "missed"),
    [
        pytest.param(TAIL, [(0.11, 2)], "saving", False, False, id="good"),
        # To one group while all are live, where steps take twice as long.
        pytest.param(EQUAL, [(0.2, 14)], "saving", True, False, id="a loss"),
        pytest.param(EQUAL, [(0.2, 14)], "probe", False, False, id="a probe"),
        pytest.param(TAIL, [], "", False, True, id="not switched"),
        # It would have paid from 0.1 s on, with 3 live.
        pytest.param(LATE, [(0.85, 2)], "saving", False, True, id="late"),
        pytest.param([90] * 14, [], "", False, False, id="does not pay"),
    ],
)
def test_judgement(
    lengths: list[int], moves: Sequence[tuple[float, int]], why: str, wrong: bool, missed: bool
) -> None:
    """Of a run that switches to one group at `moves`: seconds, and live requests."""
    trace = batch(*lengths, prompt=8)
    run = Run(
        side=PAT,
        workload=trace.name,
        repeat=1,
        began=100.0,
        seconds=1.0,
        tokens=sum(lengths),
        response=1.0,
        ends=tuple(0.01 * n for n in sorted(lengths)),
        spans=((ONE, 0.0, 1.0), *((TWO, at, 1.0) for at, _ in moves)),
        switches=tuple(switch_report(100 + at, num_seqs=live, seconds=0.1) for at, live in moves),
        decisions=tuple(decision(100 + at, live, why) for at, live in moves),
    )
    capacity = capacity_of(max_num_seqs=64)
    result = judge(
        trace, run, CalibratedSimulator(Crossover(), capacity, (ONE, TWO), {ONE: 1.0, TWO: 1.0})
    )
    saved = [switch.saved for switch in result.switches]
    assert (result.false_positives, result.missed) == (wrong, missed)
    assert result.lost == pytest.approx(-saved[0] if wrong else 0)
    assert result.probing == pytest.approx(-saved[0] if why == "probe" else 0)
    # A loss is not counted as foregone once more.
    assert (result.foregone > 0) == missed
    assert result.clairvoyant <= result.replayed + 1e-9
    if not moves:
        assert result.foregone == pytest.approx(result.replayed - result.clairvoyant)
    if lengths is LATE:
        assert result.foregone == pytest.approx(70 * 0.005, rel=0.1)


def test_ratios_are_those_of_pairs() -> None:
    """What both had in common cancels out, and an outlier is not in the median's interval."""
    for median in (False, True):
        ratio = paired_ratio([1.5, 3.0, 0.6], [1.0, 2.0, 0.4], median=median)
        assert (ratio.centre, ratio.low, ratio.high) == pytest.approx((1.5, 1.5, 1.5))
    ours = [1.0, 1.02, 1.01, 0.99, 1.0, 1.01, 0.98, 1.0, 9.0]
    ratio = paired_ratio(ours, [1.0] * 9, median=True)
    assert ratio.low <= ratio.centre == 1.0 <= ratio.high < 1.03
    assert paired_ratio(ours, [1.0] * 9).centre == pytest.approx(statistics.geometric_mean(ours))
    intervals = ((0.98, 1.0, 1.01), (0.98, 1.0, 1.02), (1.0, 1.02, 1.03), (1.02, 1.03, 1.04))
    verdicts = [Ratio(mid, low, high, ()).verdict(1.01) for low, mid, high in intervals]
    assert verdicts == ["met", "centre within", "centre beyond", "missed"]


def test_each_side_is_as_often_at_each_place() -> None:
    orders = turns("abc", 6)
    assert all(sorted(place) == [*"aabbcc"] for place in zip(*orders, strict=True))
    before = [(a, b) for order in orders for a, b in combinations(order, 2)]
    assert all(before.count((a, b)) == 3 for a, b in permutations("abc", 2))


@pytest.mark.parametrize(
    ("samples", "grown"),
    [
        pytest.param([10 + i / 10 for i in range(30)], True, id="a leak"),
        pytest.param([7.0] * 20 + [8.0] * 10, True, id="a step"),
        pytest.param([float(min(i, 9)) for i in range(30)], False, id="a warm-up"),
        pytest.param([10.0 + (i % 5 == 0) * 50 for i in range(60)], False, id="comes and goes"),
        pytest.param([50.0 - i for i in range(30)], False, id="falls"),
    ],
)
def test_growth(samples: list[float], grown: bool) -> None:
    assert trend("some", samples, 0.0).grown == grown


def test_most_solutions_are_right_and_none_is_like_another() -> None:
    rng = random.Random(0)
    right = 0
    for _ in range(300):
        one = problem(rng)
        assert 0 <= one.answer < MODULUS
        assert one.text.endswith(("?", "."))
        first, second = solution(rng, one), solution(rng, one)
        assert first != second
        right += graded(first) == one.answer
    assert 200 < right < 300  # some steps are wrong, on purpose
    assert graded("Answer: 1, no. Answer: 23") == 23
    assert graded("23") is None

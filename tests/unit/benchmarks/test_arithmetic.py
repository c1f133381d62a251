"""Benchmarks: ratios, turns, growth and problems, on known numbers."""

from __future__ import annotations

import random
import statistics
from itertools import combinations, permutations

import pytest

from benchmarks.endurance.growth import trend
from benchmarks.paired import Ratio, paired_ratio, turns
from benchmarks.rollouts.arithmetic import MODULUS, problem, solution
from benchmarks.rollouts.reward import graded


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
        task = problem(rng)
        assert 0 <= task.answer < MODULUS
        assert task.text.endswith(("?", "."))
        first, second = solution(rng, task), solution(rng, task)
        assert first != second
        right += graded(first) == task.answer
    assert 200 < right < 300  # some steps are wrong, on purpose
    assert graded("Answer: 1, no. Answer: 23") == 23
    assert graded("23") is None

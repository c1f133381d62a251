"""The arithmetic of the measurements of speculation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import MODELS
from benchmarks.speculation.engines import repeating_prompts
from benchmarks.speculation.paired import (
    Cell,
    ChangeCycle,
    MedianRatio,
    grid,
    neighbours,
    room,
    shuffled,
    turns,
)
from tests.support.mutation import mutated

SECONDS = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=12)


@given(SECONDS, st.floats(0.1, 10))
def test_a_ratio_is_that_of_pairs(theirs: list[float], factor: float) -> None:
    """Whatever both had in common cancels out, and no luck is left in the interval."""
    ratio = MedianRatio.of([factor * one for one in theirs], theirs)
    for value in (ratio.median, ratio.low, ratio.high, *ratio.values):
        assert math.isclose(value, factor)


def test_a_ratios_interval_holds_its_median_and_not_one_outlier() -> None:
    ratio = MedianRatio.of([1.0, 1.02, 1.01, 0.99, 1.0, 1.01, 0.98, 1.0, 9.0], [1.0] * 9)
    assert ratio.low <= ratio.median == 1.0 <= ratio.high < 1.03
    assert ratio.show() == f"1.000 ({ratio.low:.3f}-{ratio.high:.3f})"


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0])])
def test_a_ratio_needs_pairs(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError):
        MedianRatio.of(ours, theirs)


@pytest.mark.parametrize(
    ("low", "median", "high", "verdict"),
    [
        (0.98, 1.0, 1.01, "met"),
        (0.98, 1.0, 1.02, "median within"),
        (1.0, 1.02, 1.03, "median beyond"),
        (1.02, 1.03, 1.04, "missed"),
    ],
)
def test_a_verdict_says_whether_the_interval_decides(
    low: float, median: float, high: float, verdict: str
) -> None:
    assert MedianRatio(median, low, high, ()).verdict(1.01) == verdict


def check_turns(sides: int) -> None:
    """In whole rounds each side is as often at each place, and before each other side."""
    orders = turns(range(sides), 4 * sides)
    assert all(sorted(order) == list(range(sides)) for order in orders)
    for place in range(sides):
        assert set(Counter(order[place] for order in orders).values()) == {4}
    before = Counter(
        (order[i], order[j]) for order in orders for i in range(sides) for j in range(i + 1, sides)
    )
    assert set(before.values()) == {2 * sides}


@pytest.mark.parametrize("sides", [2, 3, 4])
def test_no_side_is_favoured_by_the_order(sides: int) -> None:
    check_turns(sides)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"repeat % 2 == 0": "True"}, id="never reversed"),
        pytest.param({"repeat // 2 % len(sides)": "0"}, id="never rotated"),
    ],
)
def test_a_favoured_side_is_noticed(changes: dict[str, str]) -> None:
    with mutated(turns, changes), pytest.raises(AssertionError):
        check_turns(3)


def test_only_values_of_the_same_way_are_compared() -> None:
    ways = ["there", "back"] * 4
    ours = [True, True, False, False, False, False, True, True]
    values = [1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0]
    assert neighbours(ways, values, ours) == ([10.0, 40.0, 1.0, 4.0], [20.0, 30.0, 2.0, 3.0])
    # What has no partner is left out.
    assert neighbours(["there"] * 3, [1.0, 2.0, 3.0], [True, False, True]) == ([1.0], [2.0])


def change_cycle(step: Callable[[int], float], stall: float) -> ChangeCycle:
    """Four windows of an engine whose step with drafts of a length takes `step(length)`.

    A change that is asked for after a window's beginning finds the first of its steps running, and
    the drafts of the second one made.
    """
    drafts = [4, 4]  # of the running step, and of those that were made for the next one
    windows = []
    for change in (None, 0, None, 4):
        seconds = 0.0 if change is None else stall
        length = drafts[-1] if change is None else change
        for _ in range(4):
            seconds += step(drafts.pop(0))
            drafts.append(length)
        windows.append(seconds)
    return ChangeCycle(*windows)


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0, 1))
def test_windows_with_a_change_differ_by_what_it_costs(
    short: float, long: float, stall: float
) -> None:
    cycle = change_cycle(lambda length: long if length else short, stall)
    assert math.isclose(cycle.with_changes - cycle.without, 2 * stall, abs_tol=1e-9)
    assert math.isclose(cycle.long, 4 * long) and math.isclose(cycle.short, 4 * short)


def cell(layout: str, length: int, *seconds: float) -> Cell:
    return Cell(layout, length, seconds, 0.5 if length else None)


def test_the_room_is_relative_to_the_best_layout_without_drafts() -> None:
    cells = [
        cell("tp1dp2", 0, 4.0, 4.4, 4.2),
        cell("tp1dp2", 4, 2.0, 2.1, 2.2),
        cell("tp2dp1", 0, 3.0, 3.2, 2.0),
        cell("tp2dp1", 4, 1.5, 1.4, 9.0),
    ]
    best, plain, ratio = room(cells)
    assert (best, plain) == (cells[3], cells[2])
    assert ratio.values == (1.5 / 3.0, 1.4 / 3.2, 9.0 / 2.0) and ratio.median == 0.5
    with pytest.raises(ValueError, match="draft length of 0"):
        room([one for one in cells if one.length])


@given(st.integers(0, 9))
def test_every_cell_is_measured_once_a_repeat(seed: int) -> None:
    cells = grid((1, 2), (0, 1, 2, 4, 7))
    assert len(cells) == 10 and sorted(shuffled(cells, seed)) == cells


def test_prompts_go_on_with_the_models_phrase() -> None:
    size = 16
    prompts: list[Any] = repeating_prompts("repeating", 8, seed=1)
    assert (
        prompts
        == repeating_prompts("repeating", 8, seed=1)
        != repeating_prompts("repeating", 8, seed=2)
    )
    begun = {tuple(one["prompt_token_ids"][:8]) for one in prompts}
    assert len(begun) == 8
    assert MODELS["repeating"].get("phrase", size) == size
    for one in prompts:
        phrase = one["prompt_token_ids"][8:]
        assert len(phrase) > 2 * size and set(phrase) == set(range(3, 3 + size))
        assert all((b - a) % size == 1 for a, b in itertools.pairwise(phrase))

"""The arithmetic of the measurements of speculation."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import MODELS
from benchmarks.speculation import alternate, engines, steps, switches, tail
from benchmarks.speculation.engines import Batch, Served, repeating_prompts
from benchmarks.speculation.paired import (
    Cell,
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


# ---------------------------------------------------------------- whole, with engines that pretend


class Pretended:
    """An engine whose batches take a known time on a clock of its own."""

    running: ClassVar[set[int]] = set()
    clock = 0.0

    def __init__(self, options: dict[str, Any], bind: str, core_inside: bool = False) -> None:
        self.uses_pat = options.get("distributed_executor_backend") == "pat"
        self.most = options.get("speculative_config", {}).get("num_speculative_tokens", 0)

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.discard(id(self))

    def wait_until_ready(self) -> float:
        self.resume()
        return 0.0

    def resume(self) -> None:
        self.running.add(id(self))

    def pause(self) -> None:
        self.running.remove(id(self))

    def start(self, function: Any, batch: Batch) -> None:
        assert id(self) in self.running
        self.batch = batch

    def result(self) -> Served:
        batch = self.batch
        length = self.most if batch.length is None else batch.length
        seconds = (2.0 if self.uses_pat else 1.9) / (1 + length / 8) / (batch.tp or 1)
        tokens = tuple((sum(one["prompt_token_ids"]),) for one in batch.prompts)
        drafted = length * len(batch.prompts)
        counts = (batch.new_tokens, drafted, drafted // 2) if self.uses_pat else (0, 0, 0)
        Pretended.clock += seconds
        return Served(Pretended.clock - seconds, Pretended.clock, tokens, *counts)

    def call(self, function: Any, *args: Any) -> Any:
        if function is engines.serve:
            self.start(function, *args)
            return self.result()
        if function is steps.take_changes:
            seconds = 0.02 if self.uses_pat else 0.019
            return [steps.Step(length, 0, 8, seconds) for length in (4, 0) * args[1]]
        if function is steps.take_plain_steps:
            seconds = 0.02 if self.uses_pat else 0.019
            return [steps.Step(0, at, 8, seconds) for at in range(args[1])]
        assert function is switches.take_switches
        reports: list[dict[str, Any]] = []
        drafts = [turn % 4 in (0, 3) for turn in range(2 * args[1]) for _ in range(2)]
        for index, one in enumerate(drafts):
            way = ("tp1dp2", "tp2dp1")[:: 1 if index % 2 == 0 else -1]
            stall = 0.0103 if one else 0.01
            reports.append(
                dict(source=way[0], target=way[1], seconds=stall + 0.02, quiesce=0.02)
                | dict(first_step=0.03)
            )
        return switches.Switches(tuple(drafts), tuple(reports), 0.5, 0.6)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (alternate, steps, switches, tail):
        monkeypatch.setattr(module, "Engine", Pretended)
    monkeypatch.setattr(engines, "model", str)
    monkeypatch.setattr(engines, "_SETTLE_SECONDS", 0.0)


@pytest.mark.usefixtures("pretended")
def test_sides_that_take_turns() -> None:
    body, text = alternate.static("repeating", alternate.Size(4, 8, 3), 4)
    assert math.isclose(body["tp2dp1"]["ratio"].median, 2.0 / 1.9)
    assert body["tp2dp1"]["unequal_batches"] == body["tp1dp2"]["unequal_batches"] == 0
    assert [len(turns) for turns in body["tp1dp2"]["turns"].values()] == [3, 3]
    assert "| tp2dp1 | 1.333 (1.333-1.333) | 1.267 (1.267-1.267) | 166.7 | 0.50 | 1.053" in text
    assert "| 1.03 | missed | 0 |" in text
    assert not Pretended.running


@pytest.mark.usefixtures("pretended")
def test_switches_with_drafts_and_without() -> None:
    body, text = switches.measure("repeating", 8, 4, 4)
    assert math.isclose(body["stall tp1dp2 -> tp2dp1"].median, 1.03)
    assert "| stall | tp2dp1 -> tp1dp2 | 10.3 (10.3-10.3) | 10.0 (10.0-10.0) | 1.030" in text


@pytest.mark.usefixtures("pretended")
def test_a_draft_length_of_0_against_none() -> None:
    body, text = steps.off("repeating", 8, 5, 3, 4)
    assert body["0 drafts / none"].median == 1.0
    assert "| 0 drafts / none | 20.00 | 20.00 | 1.000 (1.000-1.000) | 1.01 | met |" in text
    assert math.isclose(body["none / stock"].median, 0.02 / 0.019)
    assert not Pretended.running


@pytest.mark.usefixtures("pretended")
def test_changes_of_the_draft_length() -> None:
    body, text = steps.change("repeating", 8, 2, 3, 4)
    assert math.isclose(body["ratio"].median, 0.02 / 0.019)
    assert "| 0 | 1 | 8.0 | 20.0 | 19.0 | 1.053 (1.053-1.053) |" in text


@pytest.mark.usefixtures("pretended")
def test_the_room_of_a_long_tail() -> None:
    body, text = tail.measure("repeating", (2, 8), 16, 2)
    found = body["8 responses"]
    assert (found["best"], found["best_without"]) == (["tp2dp1", 7], "tp2dp1")
    assert math.isclose(found["ratio"].median, 8 / 15)
    assert "| layout | draft length 0 | 1 | 2 | 4 | 7 |" in text
    assert "Best is tp2dp1 with draft length 7: 0.533 (0.533-0.533) of the time of tp2dp1" in text

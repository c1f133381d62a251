"""Paired ratios and the order of turns. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

_RESAMPLES = 10_000

Side = TypeVar("Side")


@dataclass(frozen=True)
class MedianRatio:
    """A ratio of paired repeats.

    Attributes:
        median: of the repeats' ratios.
        low, high: its bootstrap 95% confidence interval.
        values: of the repeats.
    """

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> MedianRatio:
        """Ours over theirs, repeat by repeat: what both had in common cancels out.

        Raises:
            ValueError: there are no repeats, or not equally many.
        """
        values = np.array([a / b for a, b in zip(ours, theirs, strict=True)])
        if not len(values):
            raise ValueError("a ratio needs at least one repeat")
        picks = np.random.default_rng(seed).integers(len(values), size=(_RESAMPLES, len(values)))
        low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
        return cls(float(np.median(values)), float(low), float(high), tuple(values.tolist()))

    def show(self) -> str:
        """Like `1.003 (0.998-1.006)`."""
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"

    def verdict(self, bar: float) -> str:
        """Whether the ratio is at most `bar`: by its whole interval, or by its median alone."""
        if self.high <= bar:
            return "met"
        if self.low > bar:
            return "missed"
        return "median within" if self.median <= bar else "median beyond"


def turns(sides: Sequence[Side], repeats: int) -> list[tuple[Side, ...]]:
    """The order of the sides in each repeat.

    In any 2 n repeats of n sides each side is as often at each place, and as often before each
    other side as after it.
    """
    orders = []
    for repeat in range(repeats):
        first = repeat // 2 % len(sides)
        order = (*sides[first:], *sides[:first])
        orders.append(order if repeat % 2 == 0 else order[::-1])
    return orders


def neighbours(
    ways: Sequence[str], values: Sequence[float], ours: Sequence[bool]
) -> tuple[list[float], list[float]]:
    """Pair what was measured in turns: each value of ours with one of theirs, of the same way.

    Args:
        ways: what each value is of; only values of the same one are compared.
        values: in the order in which they were measured.
        ours: whether each is ours.

    Returns:
        Ours and theirs, equally many: the first with the first of each way, and so on. What has
        no partner is left out.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for way in sorted(set(ways)):
        of_way = [
            (one, value) for w, value, one in zip(ways, values, ours, strict=True) if w == way
        ]
        pairs = list(
            zip(
                (value for one, value in of_way if one),
                (value for one, value in of_way if not one),
                strict=False,
            )
        )
        found[0].extend(a for a, _ in pairs)
        found[1].extend(b for _, b in pairs)
    return found


@dataclass(frozen=True)
class Cell:
    """Batches in one layout with one draft length.

    Attributes:
        seconds: of each repeat's batch.
        accepted: share of the draft tokens that were accepted, of all repeats; None without drafts.
    """

    layout: str
    length: int
    seconds: tuple[float, ...]
    accepted: float | None

    @property
    def median(self) -> float:
        """Median of `seconds`."""
        return statistics.median(self.seconds)


def room(cells: Sequence[Cell]) -> tuple[Cell, Cell, MedianRatio]:
    """The best cell, the best without drafts, and the ratio of their times.

    Best is what has the lowest median, so that no repeat's luck is chosen.

    Raises:
        ValueError: there is no cell without drafts.
    """
    best = min(cells, key=lambda cell: cell.median)
    without = [cell for cell in cells if cell.length == 0]
    if not without:
        raise ValueError("the room is relative to a draft length of 0, which is not among these")
    plain = min(without, key=lambda cell: cell.median)
    return best, plain, MedianRatio.of(best.seconds, plain.seconds)


def shuffled(cells: Sequence[Side], seed: int) -> list[Side]:
    """The cells in another order for each seed, so that drift does not favour one."""
    order = np.random.default_rng(seed).permutation(len(cells))
    return [cells[index] for index in order]


def grid(layouts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """All pairs of a tp and a draft length."""
    return list(itertools.product(layouts, lengths))

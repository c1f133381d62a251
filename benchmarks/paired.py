"""Ratios of paired repeats, their uncertainty, and the order of turns. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

_RESAMPLES = 10_000

Side = TypeVar("Side")


@dataclass(frozen=True)
class Ratio:
    """A ratio of paired repeats.

    Attributes:
        centre: geometric mean of the repeats' ratios, or their median.
        low, high: its bootstrap 95% confidence interval.
        values: of the repeats.
    """

    centre: float
    low: float
    high: float
    values: tuple[float, ...]

    def show(self, digits: int = 2) -> str:
        """Like `0.91 (0.88-0.94)`."""
        return f"{self.centre:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"

    def verdict(self, bar: float) -> str:
        """Whether the ratio is at most `bar`: by its whole interval, or by its centre alone."""
        if self.high <= bar:
            return "met"
        if self.low > bar:
            return "missed"
        return "centre within" if self.centre <= bar else "centre beyond"


def paired_ratio(
    ours: Sequence[float], theirs: Sequence[float], seed: int = 0, *, median: bool = False
) -> Ratio:
    """Ours over theirs, repeat by repeat: what both had in common cancels out.

    The interval is the percentile bootstrap's, over repeats; of a single one it has no width.

    Args:
        median: of the repeats' ratios, which outliers do not move, in place of their mean.

    Raises:
        ValueError: there are no repeats, or not equally many.
    """
    logs = np.array([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    if not len(logs):
        raise ValueError("a ratio needs at least one repeat")
    picks = np.random.default_rng(seed).integers(len(logs), size=(_RESAMPLES, len(logs)))
    middle = np.median if median else np.mean
    low, high = np.percentile(middle(logs[picks], axis=1), [2.5, 97.5])
    centre, low, high = (math.exp(value) for value in (middle(logs), low, high))
    return Ratio(centre, low, high, tuple(np.exp(logs).tolist()))


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

"""Paired ratios of repeats, and their uncertainty. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 10_000


@dataclass(frozen=True)
class Ratio:
    """A ratio of paired repeats.

    Attributes:
        mean: geometric mean of the repeats' ratios.
        low, high: its bootstrap 95% confidence interval.
        values: of the repeats.
    """

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    def show(self) -> str:
        """Like `0.91 (0.88-0.94)`."""
        return f"{self.mean:.2f} ({self.low:.2f}-{self.high:.2f})"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio:
    """Ours over theirs, repeat by repeat: what both had in common cancels out.

    The interval is the percentile bootstrap's, over repeats; of a single one it has no width.

    Raises:
        ValueError: there are no repeats, or not equally many.
    """
    logs = np.array([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    if not len(logs):
        raise ValueError("a ratio needs at least one repeat")
    picks = np.random.default_rng(seed).integers(len(logs), size=(_RESAMPLES, len(logs)))
    means = logs[picks].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    values = tuple(float(value) for value in np.exp(logs))
    return Ratio(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)), values)


def better_static(seconds: Mapping[str, Sequence[float]]) -> str:
    """The static side with the lowest median time over repeats."""
    return min(seconds, key=lambda side: statistics.median(seconds[side]))


def best_of_each(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """The fastest static side's time of each repeat, whichever it was."""
    return [min(repeat) for repeat in zip(*seconds.values(), strict=True)]

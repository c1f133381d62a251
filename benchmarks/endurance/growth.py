"""Whether what is sampled for long grows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MEMORY_ALLOWANCE = 0.01
"""Of the memory that a role's processes have: allocators keep what is free in pieces."""


@dataclass(frozen=True)
class Trend:
    """One quantity over time. The first third of its samples is the warm-up.

    Attributes:
        first, middle, last: medians of the thirds.
        allowed: how much more than the middle the last third may have.
    """

    name: str
    first: float
    middle: float
    last: float
    allowed: float

    @property
    def grown(self) -> bool:
        """Whether it grew after the warm-up by more than is allowed."""
        return self.last - self.middle > self.allowed


def trend(name: str, samples: Sequence[float], allowance: float = 0.0) -> Trend:
    """Compare the medians of the last and the middle third.

    What comes and goes does not move a median, and the spread of the middle third (between its
    quartiles) is what it does by itself: growth is what exceeds that.

    Args:
        samples: at least nine, in the order of time.
        allowance: share of the middle that it may grow by, if that is more than the spread.

    Raises:
        ValueError: there are too few samples.
    """
    if len(samples) < 9:
        raise ValueError(f"{len(samples)} samples of {name}: at least 9 are needed; run for longer")
    third = len(samples) // 3
    first, middle, last = samples[:third], samples[third : 2 * third], samples[2 * third :]
    low, median, high = statistics.quantiles(middle, n=4, method="inclusive")
    return Trend(
        name,
        statistics.median(first),
        median,
        statistics.median(last),
        max(allowance * median, high - low),
    )

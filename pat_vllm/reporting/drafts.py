"""Draft length and acceptance over time. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pat_vllm.reporting.values import DraftSample


@dataclass(frozen=True)
class DraftMean:
    """The steps of all replicas in some interval of time.

    Attributes:
        start, end: of the interval, seconds.
        num_speculative_tokens: mean over its steps.
        acceptance: share of the draft tokens that were accepted; None where none were verified.
    """

    start: float
    end: float
    num_speculative_tokens: float
    acceptance: float | None


def drafts_over_time(
    samples: Iterable[DraftSample], began: float, width: float = 1.0
) -> tuple[DraftMean, ...]:
    """Means over intervals of `width` seconds, oldest first; those without a step are left out.

    Args:
        began: when the first interval begins, on the clock of the samples; earlier ones are left
            out. The means count seconds from it.
        width: not below a second, which is as far as samples tell times apart.
    """
    by_interval: dict[int, list[DraftSample]] = {}
    for one in samples:
        if one.at >= began:
            by_interval.setdefault(int((one.at - began) / width), []).append(one)
    return tuple(_mean(by_interval[i], i * width, (i + 1) * width) for i in sorted(by_interval))


def _mean(samples: list[DraftSample], start: float, end: float) -> DraftMean:
    steps = sum(one.steps for one in samples)
    drafted = sum(one.drafted for one in samples)
    return DraftMean(
        start=start,
        end=end,
        num_speculative_tokens=sum(s.num_speculative_tokens * s.steps for s in samples) / steps,
        acceptance=sum(one.accepted for one in samples) / drafted if drafted else None,
    )

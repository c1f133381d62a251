"""Whether a profile is good enough to decide by. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pat_vllm.profile import StepSample

UNSETTLED = 0.5
"""A step is unsettled if the middle half of its repeats spreads over more of their median."""
MOST_UNSETTLED = 0.2
"""Share of a profile's steps that may be unsettled."""
MOST_LEFT_OUT = 0.25
"""Share of a plan's points that may be left out."""
REMEDY = (
    "Let nothing else run on the engine's devices and cores while it is measured, or measure with "
    "more time: `pat-vllm profile MODEL --budget SECONDS --output FILE` with the engine's options, "
    "and name the file in pat.policy.profile"
)


def spread(times: Sequence[float]) -> float:
    """How far the middle half of some times lies apart, as a share of their median.

    Few outliers do not change it. 0 of fewer than three times, which say nothing of it.
    """
    if len(times) < 3:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / middle


def unsettled(sample: StepSample) -> bool:
    """Whether a step's repeats differ so much that their median says little."""
    return spread(sample.times) > UNSETTLED


def is_complete(left_out: int, planned: int) -> bool:
    """Whether so many points of a plan may be left out."""
    return left_out <= MOST_LEFT_OUT * planned


def becomes_complete(measured: int, skipped: int, planned: int) -> bool:
    """Whether a plan lacks points, of which so many are measured and others left out, and can still
    have enough."""
    return is_complete(skipped, planned) and not is_complete(planned - measured, planned)


def problems(steps: Sequence[StepSample], left_out: int = 0, planned: int = 0) -> list[str]:
    """What makes a profile a bad base for decisions, with figures; empty if nothing does. Of its
    plan's points so many were `left_out` for want of time."""
    defects = []
    noisy = [sample for sample in steps if unsettled(sample)]
    if len(noisy) > MOST_UNSETTLED * len(steps):
        worst = max(noisy, key=lambda sample: sample.high / sample.low)
        defects.append(
            f"it is noisy: in {len(noisy)} of {len(steps)} steps the middle half of the repeats "
            f"spreads over more than {UNSETTLED:.0%} of the median (at most {MOST_UNSETTLED:.0%} "
            f"of the steps may); one step of {worst.layout} with batch {worst.batch} took from "
            f"{1e3 * worst.low:.3g} to {1e3 * worst.high:.3g} ms"
        )
    if not is_complete(left_out, planned):
        defects.append(
            f"it is incomplete: {left_out} of {planned} points were left out for want of time "
            f"(at most {MOST_LEFT_OUT:.0%} may be)"
        )
    return defects

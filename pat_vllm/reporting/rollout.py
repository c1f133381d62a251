"""One line about a rollout, for the logs of trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from pat_vllm.reporting.text import switch_in_words
from pat_vllm.reporting.values import BatchSavings, Report, total

REPORT_SECONDS = 30.0
"""How long a trainer waits for a report."""


async def describe_awaited(
    report: Awaitable[Report], started: float, seconds: float, responses: int
) -> str:
    """Like `describe`, for a report that is on its way. If none comes, the line says why.

    A log line is no reason to fail a rollout that is complete. The caller checks afterwards whether
    the engine is alive.
    """
    try:
        return describe(await asyncio.wait_for(report, REPORT_SECONDS), started, seconds, responses)
    except Exception as error:
        return f"{_made(seconds, responses)}; no report of the engine: {error!r}"


def describe(report: Report, started: float, seconds: float, responses: int) -> str:
    """What the engine did in a rollout, in one line.

    Args:
        report: made after the rollout; `since` its start is enough.
        started: when the rollout began, in seconds on the monotonic clock, as in the report.
        seconds: what the rollout took.
        responses: how many it made.
    """
    parts = [_made(seconds, responses)]
    switches = [s for s in report.switches if s.at >= started and s.reason != "idle"]
    parts += [switch_in_words(one, started) for one in switches]
    if not switches:
        parts.append("no switch")
    not_made = [one for one in report.refused if one.at >= started]
    refused = sum(one.expected for one in not_made)
    counts = ((refused, "refused"), (len(not_made) - refused, "failed to plan"))
    if any(count for count, _ in counts):
        parts.append(", ".join(f"{count} {what}" for count, what in counts if count))
    drafts = [one for one in report.drafts if one.at >= started]
    if drafted := sum(one.drafted for one in drafts):
        accepted = sum(one.accepted for one in drafts)
        lengths = sorted({one.num_speculative_tokens for one in drafts})
        steps = sum(one.steps for one in drafts)
        mean = sum(one.num_speculative_tokens * one.steps for one in drafts) / steps
        among = (
            f"k {lengths[0]} to {lengths[-1]}, mean {mean:.1f}" if lengths[1:] else f"k {mean:g}"
        )
        parts.append(f"{among}, {accepted} of {drafted} draft tokens accepted")
    parts += _saved([one for one in report.predictor.savings if one.at >= started])
    if (predictor := report.predictor).responses:
        parts.append(f"learnt from {predictor.responses} responses in {predictor.batches} batches")
    return "; ".join(parts)


def _made(seconds: float, responses: int) -> str:
    return f"{responses} responses in {seconds:.2f} s"


def _saved(batches: Sequence[BatchSavings]) -> list[str]:
    """What layouts and drafts saved, if they made a difference."""
    realised = total(one.realised for one in batches)
    if realised.fixed == realised.drafting:
        return []
    predicted = total(one.predicted for one in batches)
    saved = f"saved {realised.saved_by_layouts:.0%} by layouts"
    expected = f"predicted {predicted.saved_by_layouts:.0%}"
    if realised.switching != realised.drafting:
        saved += f", {realised.saved_by_drafts:.0%} by drafts"
        expected += f", {predicted.saved_by_drafts:.0%}"
    return [f"{saved} over {batches[0].layout} without drafts (estimated; {expected})"]

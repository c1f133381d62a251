"""A report in words: printed, and as a line about a rollout for the logs of trainers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from pat_vllm.reporting.run import Run, mean_length

if TYPE_CHECKING:
    from pat_vllm.reporting.values import BatchSavings, BatchTimes, Report, SwitchReport

_MOST_LINES = 40
"""Of switches and batches; a report may hold thousands."""
REPORT_SECONDS = 30.0
"""How long a trainer waits for a report."""


def describe_report(report: Report) -> str:
    """The sentence of `summary`, and below it what happened, in the order of time.

    Of many switches and batches only the last are listed.
    """
    began = Run.of(report).began
    happened = [
        *(
            (switch.at, f"{switch_in_words(switch, began)} ({switch.reason})")
            for switch in report.switches
        ),
        *(
            (
                refusal.at,
                f"no switch to {refusal.target} at {refusal.at - began:.2f} s: {refusal.why}",
            )
            for refusal in report.refused
        ),
        *((batch.at, _batch(batch, began)) for batch in report.predictor.savings),
    ]
    lines = [line for at, line in sorted(happened, key=lambda event: event[0]) if at >= began]
    if (earlier := len(lines) - _MOST_LINES) > 0:
        lines = [f"({earlier} earlier lines are left out)", *lines[earlier:]]
    steps = ", ".join(
        f"{count.steps} in {layout} (median {count.median * 1e3:.1f} ms)"
        for layout, count in report.steps.items()
    )
    if len(report.layouts) == 1 and report.chosen:
        lines.append(report.chosen)
    lines.append(f"now in {report.layout}; steps since the start: {steps or 'none'}")
    if report.later_turns:
        lines.append(f"{report.later_turns} requests continued an ended one")
    if report.errors:
        lines.append(f"{report.errors} switches failed to plan: see the engine's log")
    return "\n  ".join([summary(report), *lines])


def summary(report: Report) -> str:
    """What an engine did, in a sentence."""
    most = max((sample.num_seqs for sample in report.timeline), default=0)
    ranks = report.layouts[0].world_size
    if not most:
        return f"no requests yet, {ranks} ranks"
    run = Run.of(report)
    switches = run.switches
    stalls = sum(switch.seconds for switch in switches)
    text = (
        f"{most} requests at most, {ranks} ranks, {run.seconds:.1f} s; "
        f"{len(switches)} switch{'' if len(switches) == 1 else 'es'} in {stalls:.2f} s"
    )
    if savings := report.predictor.savings:
        predicted, took = _totals(savings)
        if took.fixed > 0:
            text += (
                f"; saved {took.fixed - took.drafting:.1f} of {took.fixed:.1f} s in "
                f"{savings[0].layout} without drafts (estimated; predicted "
                f"{predicted.fixed - predicted.drafting:.1f} s)"
            )
    return text


def switch_in_words(switch: SwitchReport, began: float) -> str:
    """A switch, with the seconds from `began` until it."""
    return (
        f"{switch.source} -> {switch.target} at {switch.at - began:.2f} s, {switch.num_seqs} live, "
        f"{switch.seconds * 1e3:.0f} ms"
    )


def _batch(batch: BatchSavings, began: float) -> str:
    took, predicted = batch.realised, batch.predicted
    return (
        f"batch ended at {batch.at - began:.2f} s: {took.drafting:.2f} s since its first plan "
        f"(predicted {predicted.drafting:.2f} s); in {batch.layout} without drafts "
        f"{took.fixed:.2f} s (estimated; predicted {predicted.fixed:.2f} s)"
    )


# -------------------------------------------------------------------- a rollout


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
    run = Run(report, started, math.inf)
    parts += [switch_in_words(switch, started) for switch in run.switches]
    if not run.switches:
        parts.append("no switch")
    expected = [refusal.expected for refusal in report.refused if refusal.at >= started]
    counts = ((expected.count(True), "refused"), (expected.count(False), "failed to plan"))
    if expected:
        parts.append(", ".join(f"{count} {what}" for count, what in counts if count))
    if drafted := run.drafted:
        drafts = run.drafts
        accepted = sum(sample.accepted for sample in drafts)
        lengths = sorted({sample.num_speculative_tokens for sample in drafts})
        among = f"k {lengths[0]}"
        if lengths[1:]:
            among += f" to {lengths[-1]}, mean {mean_length(drafts):.1f}"
        parts.append(f"{among}, {accepted} of {drafted} draft tokens accepted")
        if repeated := sum(sample.repeated_drafted for sample in drafts):
            accepted = sum(sample.repeated_accepted for sample in drafts)
            parts[-1] += f" ({accepted} of {repeated} where earlier responses were known)"
    parts += _saved(run.savings)
    if (predictor := report.predictor).responses:
        parts.append(f"learnt from {predictor.responses} responses in {predictor.batches} batches")
    return "; ".join(parts)


def _made(seconds: float, responses: int) -> str:
    return f"{responses} responses in {seconds:.2f} s"


def _saved(batches: Sequence[BatchSavings]) -> list[str]:
    """What layouts and drafts saved, if they made a difference."""
    if not batches:
        return []
    predicted, realised = _totals(batches)
    if realised.fixed == realised.drafting:
        return []
    saved = f"saved {realised.saved_by_layouts:.0%} by layouts"
    expected = f"predicted {predicted.saved_by_layouts:.0%}"
    if realised.switching != realised.drafting:
        saved += f", {realised.saved_by_drafts:.0%} by drafts"
        expected += f", {predicted.saved_by_drafts:.0%}"
    return [f"{saved} over {batches[0].layout} without drafts (estimated; {expected})"]


def _totals(batches: Sequence[BatchSavings]) -> tuple[BatchTimes, BatchTimes]:
    """Of all batches together: as predicted, and as they came."""
    return (
        reduce(add, [batch.predicted for batch in batches]),
        reduce(add, [batch.realised for batch in batches]),
    )

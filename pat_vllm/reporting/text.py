"""A report in words: printed, and as a line about a rollout for the logs of trainers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from pat_vllm.reporting.run import Run, mean_length

if TYPE_CHECKING:
    from pat_vllm.layout import Layout
    from pat_vllm.reporting.values import (
        BatchReport,
        ControlComparison,
        DecisionReport,
        LayoutSteps,
        Report,
        SwitchReport,
    )

_MOST_LINES = 40
"""Of switches, decisions and batches; a report may hold thousands."""
REPORT_SECONDS = 30.0
"""How long a trainer waits for a report."""


def describe_report(report: Report) -> str:
    """The sentence of `summary`, and below it what happened, in the order of time.

    Of many lines only the last are shown.
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
        *(
            (decision.at, _decision(decision, began))
            for decision in report.predictor.decisions
            if decision.fired
        ),
        *((batch.at, _batch(batch, began)) for batch in report.batches),
    ]
    lines = [line for at, line in sorted(happened, key=lambda event: event[0]) if at >= began]
    if (earlier := len(lines) - _MOST_LINES) > 0:
        lines = [f"({earlier} earlier lines are left out)", *lines[earlier:]]
    steps = ", ".join(_steps(layout, count) for layout, count in report.steps.items())
    if len(report.layouts) == 1 and report.chosen:
        lines.append(report.chosen)
    if report.drafter_is_stale:
        lines.append("the drafter has older weights than the model")
    if (share := report.predictor.share_come_true) is not None:
        lines.append(
            f"steps became faster or slower as predicted after {share:.0%} of the switches"
        )
    if report.control is not None:
        lines.append(_control(report.control))
    lines.append(f"now in {report.layout}; steps since the start: {steps or 'none'}")
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
    return (
        f"{most} requests at most, {ranks} ranks, {run.seconds:.1f} s; "
        f"{len(switches)} switch{'' if len(switches) == 1 else 'es'} in {stalls:.2f} s"
    )


def switch_in_words(switch: SwitchReport, began: float) -> str:
    """A switch, with the seconds from `began` until it."""
    return (
        f"{switch.source} -> {switch.target} at {switch.at - began:.2f} s, {switch.num_seqs} live, "
        f"{switch.seconds * 1e3:.0f} ms"
    )


def _decision(decision: DecisionReport, began: float) -> str:
    def step(before: float | None, after: float | None) -> str:
        return " to ".join("-" if s is None else f"{s * 1e3:.1f}" for s in (before, after))

    return (
        f"decided for {decision.target} at {decision.at - began:.2f} s ({decision.why}): a step "
        f"from {step(decision.step_before, decision.step_after)} ms predicted, from "
        f"{step(decision.real_before, decision.real_after)} ms measured"
    )


def _batch(batch: BatchReport, began: float) -> str:
    kept = ", a control batch" if batch.control else ""
    return (
        f"batch ended at {batch.at - began:.2f} s: {batch.responses} responses, {batch.tokens} "
        f"tokens in {batch.seconds:.2f} s{kept}"
    )


def _steps(layout: Layout, steps: LayoutSteps) -> str:
    """Steps of a layout, and how long its replicas took them in the mean."""
    lengths = steps.by_draft_length
    by_length = ", ".join(
        f"k {length} {lengths[length] / layout.replicas:.1f} s" for length in sorted(lengths)
    )
    return (
        f"{steps.steps} in {layout} ({steps.seconds / layout.replicas:.1f} s, median "
        f"{steps.median * 1e3:.1f} ms{'; ' + by_length if len(lengths) > 1 else ''})"
    )


def _control(control: ControlComparison) -> str:
    return (
        f"batches that may switch take {control.ratio:.3f} ({control.low:.3f} to "
        f"{control.high:.3f}) of the time per token of {control.controls} control batches"
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
        accepted = sum(sample.counts.accepted for sample in drafts)
        lengths = sorted({sample.num_speculative_tokens for sample in drafts})
        among = f"k {lengths[0]}"
        if lengths[1:]:
            among += f" to {lengths[-1]}, mean {mean_length(drafts):.1f}"
        parts.append(f"{among}, {accepted} of {drafted} draft tokens accepted")
        if repeated := sum(sample.counts.repeated_drafted for sample in drafts):
            accepted = sum(sample.counts.repeated_accepted for sample in drafts)
            parts[-1] += f" ({accepted} of {repeated} where earlier responses were known)"
    if any(batch.control for batch in run.batches):
        parts.append("a control batch")
    if report.control is not None:
        parts.append(_control(report.control))
    if (predictor := report.predictor).responses:
        parts.append(f"learnt from {predictor.responses} responses in {predictor.batches} batches")
    return "; ".join(parts)


def _made(seconds: float, responses: int) -> str:
    return f"{responses} responses in {seconds:.2f} s"

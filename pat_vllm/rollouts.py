"""One line about a rollout, for the logs of trainers. Imports no vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from pat_vllm.reporting import Report, SwitchReport

REPORT_SECONDS = 30.0
"""How long a trainer waits for a report."""


async def describe_awaited(
    report: Awaitable[Report], started: float, seconds: float, responses: int
) -> str:
    """`describe`, of a report that has been asked for; if none comes, the line says why.

    A log line is no reason to fail a rollout that is complete. Whether the engine lives is for the
    caller to check afterwards.
    """
    try:
        return describe(await asyncio.wait_for(report, REPORT_SECONDS), started, seconds, responses)
    except Exception as error:
        return f"{_made(seconds, responses)}; no report of the engine: {error!r}"


def describe(report: Report, started: float, seconds: float, responses: int) -> str:
    """What the engine did in a rollout.

    Args:
        report: of the engine, after the rollout.
        started: when the rollout began, on the system's monotonic clock, as in the report.
        seconds: it took.
        responses: it made.
    """
    parts = [_made(seconds, responses)]
    switches = [s for s in report.switches if s.at >= started and s.reason != "idle"]
    parts += [_switch(one, started) for one in switches]
    if not switches:
        parts.append("no switch")
    if refused := sum(one.at >= started for one in report.refused):
        parts.append(f"{refused} refused")
    if (predictor := report.predictor).responses:
        parts.append(
            f"learnt from {predictor.responses} responses in {predictor.batches} batches, "
            f"siblings {predictor.siblings:.2f}"
        )
    return "; ".join(parts)


def _made(seconds: float, responses: int) -> str:
    return f"{responses} responses in {seconds:.2f} s"


def _switch(one: SwitchReport, started: float) -> str:
    return (
        f"{one.source} -> {one.target} at {one.at - started:.2f} s, {one.num_seqs} live, "
        f"{one.seconds * 1e3:.0f} ms"
    )

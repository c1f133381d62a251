"""One line about a rollout, for the logs of trainers. Pure."""

from __future__ import annotations

from pat_vllm.reporting import Report, SwitchReport


def describe(report: Report, started: float, seconds: float, responses: int) -> str:
    """What the engine did in a rollout.

    Args:
        report: of the engine, after the rollout.
        started: when the rollout began, on the system's monotonic clock, as in the report.
        seconds: it took.
        responses: it made.
    """
    parts = [f"{responses} responses in {seconds:.2f} s"]
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


def _switch(one: SwitchReport, started: float) -> str:
    return (
        f"{one.source} -> {one.target} at {one.at - started:.2f} s, {one.live} live, "
        f"{one.seconds * 1e3:.0f} ms"
    )

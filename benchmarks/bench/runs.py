"""One batch on one side, and how far the predictions in it were off. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pat_vllm.layout import Layout
from pat_vllm.reporting import DecisionReport, PredictorReport, SwitchReport

PAT = "PAT"
"""Name of the adaptive side."""


@dataclass(frozen=True)
class Run:
    """One batch on one side. Times in seconds, from the first submit on.

    Attributes:
        side: a static layout's name, or `PAT`.
        repeat: 0 is the first batch of a fresh engine.
        seconds: until the last output.
        response: mean over requests, from arrival to last token.
        live: (at, live requests from then on).
        spans: (layout, start, end), one after the other.
        switches: while requests were running or expected, so that one may be a way back between
            them; `at` is absolute, as in `decisions`.
        began: on the machine's monotonic clock.
        steps: by layout: steps, and their mean seconds.
        step_error: by layout: predicted steps, and their mean absolute relative error.
        plans, planning: how often the policy planned, and seconds in all.
    """

    side: str
    workload: str
    repeat: int
    began: float
    seconds: float
    tokens: int
    response: float
    live: tuple[tuple[float, int], ...]
    spans: tuple[tuple[Layout, float, float], ...]
    switches: tuple[SwitchReport, ...]
    decisions: tuple[DecisionReport, ...]
    steps: Mapping[Layout, tuple[int, float]]
    step_error: Mapping[Layout, tuple[int, float]]
    plans: int
    planning: float

    @property
    def switched(self) -> int:
        """Switches that carried requests."""
        return sum(switch.reason != "idle" for switch in self.switches)


def prediction_error(runs: Sequence[Run]) -> dict[str, Any]:
    """How far predictions of the PAT runs of a workload were off.

    Returns:
        Mean absolute relative errors, None without any: `steps` of decode steps, each predicted
        before it was learnt from, by layout's name; `before`, `after` of the step time before and
        after a switch, when it was decided; `cost` of the switches' summed seconds, steps in flight
        that they wait for included. And `true`: the share of the decided switches after which steps
        became faster or slower as predicted.
    """
    sums: dict[str, tuple[int, float]] = {}
    for run in runs:
        for layout, (count, mean) in run.step_error.items():
            n, total = sums.get(str(layout), (0, 0.0))
            sums[str(layout)] = (n + count, total + count * mean)
    fired = [d for run in runs for d in run.decisions if d.fired]
    switches = [s for run in runs for s in run.switches if s.reason == "policy"]

    def error(pairs: Sequence[tuple[float, float | None]]) -> float | None:
        errors = [abs(predicted / real - 1) for predicted, real in pairs if real]
        return statistics.mean(errors) if errors else None

    return {
        "steps": {name: total / n for name, (n, total) in sorted(sums.items()) if n},
        "before": error([(d.step_before, d.real_before) for d in fired]),
        "after": error([(d.step_after, d.real_after) for d in fired]),
        # Single waits for steps in flight are a matter of luck: the sums are compared.
        "cost": error([(sum(d.cost for d in fired), sum(s.seconds for s in switches))]),
        "true": PredictorReport(tuple(fired)).share_come_true,
    }

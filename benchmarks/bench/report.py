"""The benchmark's results as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.bench.runs import PAT, Run
from benchmarks.paired import paired_ratio
from benchmarks.record import Summary, table
from pat_vllm.reporting import PredictorReport

if TYPE_CHECKING:
    from benchmarks.bench.engines import BenchSettings, Measured

NEVER_WORSE = 1.05
"""What the upper end of PAT's interval is at most, relative to the better static layout."""

CONTROL_EVERY = 20
"""Batches to one control batch, as docs/reports.md advises."""


def markdown(settings: BenchSettings, measured: Measured) -> str:
    """The report."""
    config = settings.config
    layouts = [str(layout) for layout in settings.layouts]
    statics = [side for side in measured.start_seconds if side != PAT]
    of_each = {
        workload.name: _sides([run for run in measured.runs if run.workload == workload.name])
        for workload in settings.workloads
    }
    header = [
        "workload", *(f"static {side}, s" for side in statics), "PAT, s",
        "PAT / better static (95% CI)", f"bar {NEVER_WORSE}", "PAT / best of each repeat",
        "switches per batch", "stalled", "planning", *(f"step error {name}" for name in layouts),
        "switches that came true", f"time by control batches, 1 in {CONTROL_EVERY}",
        "first batch, PAT / faster static",
    ]  # fmt: skip
    first, *later = measured.start_seconds[PAT]
    then = f", then {statistics.median(later):.0f} s with the profile at hand" if later else ""
    static = [f"{statistics.median(measured.start_seconds[side]):.0f}" for side in statics]
    about = "".join(f"- `{workload.name}`: {workload.text}\n" for workload in settings.workloads)
    return (
        f"A {config['model_type']}, {config['num_hidden_layers']} layers of "
        f"{config['hidden_size']}, vocabulary {config['vocab_size']:,}, float32; {settings.ranks} "
        f"ranks, {settings.repeats} repeats, scale {settings.scale:g}, up to {settings.drafts} "
        "drafts a step. Seconds are medians "
        "(low-high).\n\n"
        + table(header, [_row(name, layouts, statics, runs) for name, runs in of_each.items()])
        + f"\nStart of the adaptive engine: {first:.0f} s with a profile taken{then}; of a static "
        f"one {', '.join(static)} s.\n\n## Workloads\n\n{about}\n## What the words mean\n\n"
        + DEFINITIONS
    )


def _sides(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by side, the first batch's first."""
    return {side: [r for r in runs if r.side == side] for side in {run.side: 0 for run in runs}}


def _row(
    name: str, layouts: Sequence[str], statics: Sequence[str], runs: dict[str, list[Run]]
) -> list[str]:
    seconds = {side: [run.seconds for run in of_side[1:]] for side, of_side in runs.items()}
    best = min(statics, key=lambda side: statistics.median(seconds[side]))
    ratio = paired_ratio(seconds[PAT], seconds[best])
    best_of_each = [min(repeat) for repeat in zip(*(seconds[s] for s in statics), strict=True)]
    ours, whole = runs[PAT][1:], sum(seconds[PAT])
    came_true = PredictorReport(tuple(d for run in ours for d in run.decisions)).share_come_true
    return [
        name,
        *(
            f"{Summary.of(seconds[side]).show(digits=2)}{' *' if side == best else ''}"
            for side in (*statics, PAT)
        ),
        f"**{ratio.show()}**",
        "met" if ratio.high <= NEVER_WORSE else "missed",
        paired_ratio(seconds[PAT], best_of_each).show(),
        f"{statistics.mean(run.switches for run in ours):.1f}",
        f"{sum(run.stalled for run in ours) / whole:.2%}",
        f"{sum(run.planning for run in ours) / whole:.2%}",
        *(_step_error(ours, layout) for layout in layouts),
        "-" if came_true is None else f"{came_true:.0%}",
        f"{(1 / ratio.centre - 1) / CONTROL_EVERY:+.2%}",
        f"{runs[PAT][0].seconds / min(runs[side][0].seconds for side in statics):.2f}",
    ]


def _step_error(runs: Sequence[Run], layout: str) -> str:
    errors = [run.step_error[layout] for run in runs if layout in run.step_error]
    steps = sum(count for count, _ in errors)
    return f"{sum(n * mean for n, mean in errors) / steps:.1%}" if steps else "-"


DEFINITIONS = """\
- **time**: from the first submit to the last output, of equal requests on every side: each
  generates exactly its number of tokens, which the predictor is not told.
- **better static** (`*`): the static layout with the lower median time over the repeats.
- **PAT / better static**: geometric mean over repeats of the ratio of the two times for one batch,
  with the percentile bootstrap's 95% confidence interval over repeats. Its upper end has the bar.
- **best of each repeat**: in place of it, whichever static layout was faster for that very batch.
- **stalled**: share of time in which nothing ran for a switch; **planning**: share spent deciding.
- **step error**: mean absolute error of predicted decode steps, each predicted before it was
  learnt from, relative to its real time.
- **switches that came true**: share after which steps became faster, or slower, as predicted.
- **time by control batches**: what they would add, were one batch in so many kept in the better
  static layout; derived from PAT / better static.
- **first batch**: of a new adaptive engine, which has seen no length yet. It is in no other column.
"""

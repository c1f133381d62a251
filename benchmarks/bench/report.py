"""The benchmark's results as plain values for a file, and as Markdown made from those. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from benchmarks.bench.runs import PAT, Run, prediction_error
from benchmarks.paired import Ratio, paired_ratio
from benchmarks.record import Summary, table
from pat_vllm.layout import Layout

if TYPE_CHECKING:
    from benchmarks.bench.engines import BenchSettings
    from benchmarks.bench.run import Measurements
    from benchmarks.bench.workloads import Workload

NEVER_WORSE = 1.05
"""What the upper end of PAT's interval is at most, relative to the better static layout."""

CONTROL_EVERY = 20
"""Batches to one control batch, as docs/reports.md advises."""


def content_of(
    settings: BenchSettings, config: Mapping[str, Any], measured: Measurements
) -> dict[str, Any]:
    """All results as JSON's values."""
    return {
        "settings": {
            "ranks": settings.ranks,
            "layouts": [str(layout) for layout in settings.layouts],
            "repeats": settings.repeats,
            "scale": settings.scale,
            "seed": settings.seed,
            "max_tokens": settings.max_tokens,
            "model": {
                key: config[key]
                for key in (
                    "model_type",
                    "hidden_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "vocab_size",
                )
                if key in config
            },
        },
        "profile": {
            "title": measured.profile.title,
            "note": measured.profile.note,
            "steps": len(measured.profile.steps),
            "switches": len(measured.profile.switches),
        },
        "start_seconds": {side: list(seconds) for side, seconds in measured.start_seconds.items()},
        "workloads": [
            _workload(settings, workload, measured.runs) for workload in settings.workloads
        ],
    }


def _workload(settings: BenchSettings, workload: Workload, runs: Sequence[Run]) -> dict[str, Any]:
    runs = [run for run in runs if run.workload == workload.name]
    cold = {run.side: run for run in runs if not run.repeat}
    warm: dict[str, list[Run]] = {side: [] for side in cold}
    for run in runs:
        if run.repeat:
            warm[run.side].append(run)
    static = {side: [run.seconds for run in warm[side]] for side in warm if side != PAT}
    best = min(static, key=lambda side: statistics.median(static[side]))
    best_of_each = [min(repeat) for repeat in zip(*static.values(), strict=True)]
    ours = [run.seconds for run in warm[PAT]]
    response = {side: [run.response for run in warm[side]] for side in warm}
    # The batch whose ratio is in the middle is the one to show.
    ratio = paired_ratio(ours, static[best], settings.seed)
    shown = sorted(warm[PAT], key=lambda run: ratio.values[run.repeat - 1])[len(ours) // 2].repeat
    cold_static = min((run.seconds, side) for side, run in cold.items() if side != PAT)
    return {
        "name": workload.name,
        "text": workload.text,
        "requests": len(settings.trace(workload, 1)),
        "tokens": statistics.median(run.tokens for run in warm[PAT]),
        "better_static": best,
        "seconds": {side: vars(Summary.of([r.seconds for r in warm[side]])) for side in warm},
        "tokens_per_second": {
            side: statistics.median(run.tokens / run.seconds for run in warm[side]) for side in warm
        },
        "relative": {
            side: asdict(paired_ratio([r.seconds for r in warm[side]], static[best], settings.seed))
            for side in warm
        },
        "relative_to_best_of_each": asdict(paired_ratio(ours, best_of_each, settings.seed)),
        "response_relative": asdict(paired_ratio(response[PAT], response[best], settings.seed)),
        "switches_per_batch": statistics.mean(run.switched for run in warm[PAT]),
        "stall_share": _stall_share(warm[PAT]),
        "planning_share": sum(run.planning for run in warm[PAT]) / sum(ours),
        "cold": {
            "seconds": cold[PAT].seconds,
            "static": cold_static[1],
            "static_seconds": cold_static[0],
            "switches": cold[PAT].switched,
        },
        "prediction": prediction_error(warm[PAT]),
        "shown": shown,
        "runs": [_plain_run(run, timeline=run.repeat == shown) for run in runs],
    }


def _plain_run(run: Run, timeline: bool) -> dict[str, Any]:
    """A run for the file of results; absolute times become times since its beginning."""

    def moved(event: Any) -> dict[str, Any]:
        values = {f.name: getattr(event, f.name) for f in fields(event)}
        for name, value in values.items():
            if isinstance(value, Layout):
                values[name] = str(value)
            elif isinstance(value, float):
                values[name] = round(value - (run.began if name == "at" else 0.0), 6)
        return values

    def by_layout(values: Mapping[Layout, tuple[int, float]]) -> dict[str, list[float]]:
        return {str(layout): [n, round(mean, 6)] for layout, (n, mean) in values.items()}

    plain: dict[str, Any] = {
        "side": run.side,
        "repeat": run.repeat,
        "seconds": run.seconds,
        "tokens": run.tokens,
        "response": run.response,
        "steps": by_layout(run.steps),
    }
    if run.side == PAT:
        plain |= {
            "spans": [[str(layout), round(a, 4), round(b, 4)] for layout, a, b in run.spans],
            "switches": [moved(switch) for switch in run.switches],
            "decisions": [moved(decision) for decision in run.decisions],
            "step_error": by_layout(run.step_error),
            "plans": run.plans,
            "planning": run.planning,
        }
    if timeline:
        plain["live"] = [[round(at, 3), live] for at, live in run.live]
    return plain


def _stall_share(runs: Sequence[Run]) -> float:
    stalls = sum(s.seconds - s.quiesce for run in runs for s in run.switches)
    return stalls / sum(run.seconds for run in runs)


# -------------------------------------------------------------------- Markdown


def markdown(content: Mapping[str, Any]) -> str:
    """The report, from the content of the JSON file."""
    settings, workloads = content["settings"], content["workloads"]
    model = settings["model"]
    parts = [
        f"A {model['model_type']}, {model['num_hidden_layers']} layers of "
        f"{model['hidden_size']}, vocabulary {model['vocab_size']:,}, float32; "
        f"{settings['ranks']} ranks, {settings['repeats']} repeats, scale {settings['scale']}. "
        f"Seconds are medians (low-high).\n",
        "## Time of a batch\n",
        _times(settings["layouts"], workloads),
        "## Cold start\n",
        _cold(content["start_seconds"], workloads),
        "## What the predictor predicted\n",
        _predictions(settings["layouts"], workloads),
        "## Workloads\n",
        "".join(f"- `{workload['name']}`: {workload['text']}\n" for workload in workloads),
        "## What the words mean\n",
        DEFINITIONS,
    ]
    return "\n".join(parts)


def _show(ratio: Mapping[str, Any]) -> str:
    return Ratio(ratio["centre"], ratio["low"], ratio["high"], ()).show()


def _times(layouts: Sequence[str], workloads: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for workload in workloads:
        seconds = {side: Summary(**value) for side, value in workload["seconds"].items()}
        static = [
            f"{seconds[layout].show(digits=2)}{' *' if layout == workload['better_static'] else ''}"
            for layout in layouts
        ]
        rows.append(
            (
                workload["name"],
                f"{workload['requests']}, {workload['tokens']:.0f}",
                *static,
                seconds["PAT"].show(digits=2),
                f"{workload['tokens_per_second']['PAT']:.0f}",
                f"**{_show(workload['relative']['PAT'])}**",
                _show(workload["relative_to_best_of_each"]),
                _show(workload["response_relative"]),
                f"{workload['switches_per_batch']:.1f}",
            )
        )
    header = (
        "workload",
        "requests, tokens",
        *(f"static {layout}, s" for layout in layouts),
        "PAT, s",
        "PAT, tokens/s",
        "PAT / better static (95% CI)",
        "PAT / best of each repeat",
        "mean response, PAT / better static",
        "switches per batch",
    )
    high = {workload["name"]: workload["relative"]["PAT"]["high"] for workload in workloads}
    verdicts = (f"{name} {'met' if end <= NEVER_WORSE else 'missed'}" for name, end in high.items())
    return (
        f"{table(header, rows)}\n`*`: the better static layout. Bar: the upper end of PAT / better "
        f"static is at most {NEVER_WORSE}: {', '.join(verdicts)}.\n"
    )


def _cold(starts: Mapping[str, Sequence[float]], workloads: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            workload["name"],
            f"{workload['cold']['static_seconds']:.2f} ({workload['cold']['static']})",
            f"{workload['cold']['seconds']:.2f}",
            f"{workload['cold']['seconds'] / workload['cold']['static_seconds']:.2f}",
            workload["cold"]["switches"],
        )
        for workload in workloads
    ]
    first, *later = starts["PAT"]
    others = f", then {statistics.median(later):.0f} s with the profile at hand" if later else ""
    static = [statistics.median(seconds) for side, seconds in starts.items() if side != "PAT"]
    note = (
        "The first batch of a new adaptive engine, which has seen no length yet, beside the faster "
        "static engine's. It is in no other table.\n\n"
    )
    return (
        note
        + table(("workload", "faster static, s", "PAT, s", "ratio", "switches"), rows)
        + f"\nStart of the adaptive engine: {first:.0f} s with a profile taken{others}; of a "
        f"static one {', '.join(f'{s:.0f}' for s in static)} s.\n"
    )


def _predictions(layouts: Sequence[str], workloads: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for workload in workloads:
        error = workload["prediction"]
        rows.append(
            (
                workload["name"],
                *(_percent(error["steps"].get(layout)) for layout in layouts),
                _percent(error["before"]),
                _percent(error["after"]),
                _percent(error["cost"]),
                _percent(error["true"]),
                f"{_control_share(workload['relative']['PAT']['centre']):+.2%}",
                f"{workload['stall_share']:.2%}",
                f"{workload['planning_share']:.2%}",
            )
        )
    header = (
        "workload",
        *(f"step error {layout}" for layout in layouts),
        "step before a switch",
        "step after",
        "cost of switches",
        "came true",
        f"time by control batches, 1 in {CONTROL_EVERY}",
        "stalled",
        "planning",
    )
    return table(header, rows)


def _control_share(ratio: float) -> float:
    """Share of time that control batches add where others take `ratio` of their time."""
    return (1 / ratio - 1) / CONTROL_EVERY


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


DEFINITIONS = """\
- **time**: from the first submit to the last output, of equal requests on every side: each
  generates exactly its number of tokens, which the predictor is not told.
- **better static**: the static layout with the lower median time over the workload's repeats.
- **PAT / better static**: geometric mean over repeats of the ratio of the two times for one batch,
  with the percentile bootstrap's 95% confidence interval over repeats.
- **best of each repeat**: in place of it, whichever static layout was faster for that very batch.
- **mean response**: seconds from a request's arrival to its last token, averaged over requests.
- **step error**: mean absolute error of predicted decode steps, each predicted before it was
  learnt from, relative to its real time; **before, after**: of the step times that a switch was
  decided by, against the median of up to 16 real steps; **cost of
  switches**: of their summed seconds, the wait for steps in flight included.
- **came true**: share of the switches after which steps became faster, or slower, as predicted.
- **time by control batches**: what they would add, were one batch in so many kept in the better
  static layout; derived from PAT / better static.
- **stalled**: share of time in which nothing ran for a switch; **planning**: share spent deciding.
"""

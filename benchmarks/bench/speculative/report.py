"""The results of the workloads with speculation, as plain values and as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from benchmarks.bench.judgement import NEVER_WORSE, Bar
from benchmarks.bench.runs import PAT, prediction_error
from benchmarks.bench.speculative.engines import (
    PAT_PLAIN,
    TABLE,
    SpeculativeRun,
    static_name,
)
from benchmarks.bench.speculative.tuning import accepted_share
from benchmarks.bench.speculative.workloads import ACCEPTED, DRAFT_LENGTHS
from benchmarks.paired import Ratio, better_static, paired_ratio
from benchmarks.record import Summary, provenance, table

if TYPE_CHECKING:
    from benchmarks.bench.engines import BenchSettings
    from benchmarks.bench.speculative.measure import Measured

_OFF, _TAIL = 1.02, 0.95


def workload_content(settings: BenchSettings, measured: Measured) -> dict[str, Any]:
    """A workload's results as JSON's values."""
    workload = measured.workload
    warm: dict[str, list[SpeculativeRun]] = {}
    for run in measured.runs:
        if run.run.repeat:
            warm.setdefault(run.run.side, []).append(run)
    seconds = {side: [one.run.seconds for one in runs] for side, runs in warm.items()}
    layouts = [str(layout) for layout in settings.layouts]

    def best(lengths: Sequence[int | str]) -> str:
        names = [static_name(one, length) for one in settings.layouts for length in lengths]
        return better_static({name: seconds[name] for name in names})

    plain, fixed, tuned = best((0,)), best(DRAFT_LENGTHS), best((TABLE,))
    pairs = {
        "layout": (PAT_PLAIN, plain),
        "k": (PAT, PAT_PLAIN),
        "both": (PAT, plain),
        "fixed": (PAT, fixed),
        "table": (PAT, tuned),
    }
    ratios = {
        name: paired_ratio(seconds[ours], seconds[theirs], settings.seed)
        for name, (ours, theirs) in pairs.items()
    }
    accepted = {model: measured.static(model) for model in dict.fromkeys(workload.models)}
    return {
        "name": workload.name,
        "text": workload.text,
        "requests": len(settings.trace(workload, 1)),
        "tokens": statistics.median(run.run.tokens for run in warm[PAT]),
        "layouts": layouts,
        "seconds": {side: vars(Summary.of(values)) for side, values in seconds.items()},
        "best_plain": plain,
        "best_fixed": fixed,
        "best_table": tuned,
        "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
        "bars": [asdict(bar) | {"verdict": bar.verdict} for bar in _bars(workload.models, ratios)],
        "accepted": {model: accepted_share(gave) for model, gave in accepted.items()},
        "accepted_by_k": {
            model: {
                str(length): accepted_share(
                    run.gave
                    for layout in settings.layouts
                    for run in warm[static_name(layout, length)]
                    if run.model == model
                )
                for length in DRAFT_LENGTHS[1:]
            }
            for model in accepted
        },
        "tables": {str(layout): [*map(list, one)] for layout, one in measured.tables.items()},
        "pat_steps": {side: _shares(warm[side]) for side in (PAT_PLAIN, PAT)},
        "switches_per_batch": {
            side: statistics.mean(run.run.switched for run in warm[side])
            for side in (PAT_PLAIN, PAT)
        },
        "prediction": {
            side: asdict(prediction_error([run.run for run in warm[side]]))
            for side in (PAT_PLAIN, PAT)
        },
        "runs": [
            {
                "side": one.run.side,
                "repeat": one.run.repeat,
                "model": one.model,
                "seconds": one.run.seconds,
                "tokens": one.run.tokens,
                "drafted": one.gave.drafted,
                "accepted": one.gave.accepted,
            }
            for one in measured.runs
        ],
    }


def _bars(models: Sequence[str], ratios: Mapping[str, Ratio]) -> list[Bar]:
    bars = [
        Bar("PAT / best fixed layout and k, upper end", NEVER_WORSE, ratios["fixed"].high),
    ]
    most = [ACCEPTED[model][1] for model in models]
    if max(most) <= _HARDLY:
        bars.append(
            Bar("PAT / PAT with k = 0, median", _OFF, statistics.median(ratios["k"].values))
        )
    elif min(most) > _HARDLY:
        bars.append(Bar("PAT / best static layout with its table", _TAIL, ratios["table"].centre))
    return bars


_HARDLY = 0.05
"""Share of the draft tokens up to which they are hardly accepted."""


def _shares(runs: Sequence[SpeculativeRun]) -> dict[str, float]:
    """Which share of the steps was made in which layout with which draft length."""
    steps: Counter[str] = Counter()
    for run in runs:
        for one in run.samples:
            steps[static_name(one.layout, one.num_speculative_tokens)] += one.steps
    total = steps.total()
    return {name: count / total for name, count in sorted(steps.items())}


# -------------------------------------------------------------------- Markdown


def markdown(content: Mapping[str, Any]) -> str:
    """The report, from the content of the JSON file."""
    settings, workloads = content["settings"], content["workloads"]
    parts = [
        "# bench-speculation\n",
        provenance(content["machine"]),
        f"{settings['ranks']} ranks, {settings['repeats']} repeats, scale {settings['scale']}; "
        "n-gram drafts. Seconds are medians (low-high).\n",
        "## Gains\n",
        _gains(workloads),
        "## Bars\n",
        _bar_rows(workloads),
        *(part for one in workloads for part in (f"## {one['name']}\n", _workload(one))),
        "## What the words mean\n",
        DEFINITIONS,
    ]
    return "\n".join(parts)


def _ratio(one: Mapping[str, Any], name: str) -> str:
    ratio = one["ratios"][name]
    return Ratio(ratio["centre"], ratio["low"], ratio["high"], ()).show()


def _gains(workloads: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        ("layout alone: PAT, k = 0 / best static, k = 0", "layout"),
        ("k alone: PAT / PAT, k = 0", "k"),
        ("both: PAT / best static, k = 0", "both"),
        ("PAT / best fixed layout and k", "fixed"),
        ("PAT / best static layout with its table", "table"),
    ]
    return table(
        ("ratio (95% CI)", *(one["name"] for one in workloads)),
        [(text, *(_ratio(one, name) for one in workloads)) for text, name in rows],
    )


def _bar_rows(workloads: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (one["name"], bar["what"], bar["limit"], f"{bar['value']:.3f}", bar["verdict"])
        for one in workloads
        for bar in one["bars"]
    ]
    return table(("workload", "bar", "at most", "measured", ""), rows)


def _workload(one: Mapping[str, Any]) -> str:
    seconds = {side: Summary(**value) for side, value in one["seconds"].items()}
    best = {one["best_plain"], one["best_fixed"], one["best_table"]}

    def cell(side: str) -> str:
        return seconds[side].show(digits=2) + (" *" if side in best else "")

    columns = [f"k = {length}" for length in DRAFT_LENGTHS] + [TABLE]
    times = table(
        ("", *columns, "planned"),
        [
            *(
                (layout, *(cell(f"{layout}, {column}") for column in columns), "")
                for layout in one["layouts"]
            ),
            (PAT, cell(PAT_PLAIN), *[""] * (len(columns) - 1), cell(PAT)),
        ],
    )
    accepted = "; ".join(
        f"{model} {share:.3f} ("
        + ", ".join(f"k = {k}: {v:.3f}" for k, v in one["accepted_by_k"][model].items())
        + ")"
        for model, share in one["accepted"].items()
    )
    tables = "; ".join(f"{layout} {ranges}" for layout, ranges in one["tables"].items())
    lines = [
        f"Accepted share of the draft tokens, on the static sides: {accepted}.",
        f"Tables: {tables}.",
    ]
    for side in (PAT_PLAIN, PAT):
        steps = ", ".join(f"{name} {share:.0%}" for name, share in one["pat_steps"][side].items())
        errors = ", ".join(
            f"{layout} {error:.1%}" for layout, error in one["prediction"][side]["steps"].items()
        )
        lines.append(
            f"{side}: {one['switches_per_batch'][side]:.1f} switches per batch; steps: {steps}; "
            f"step error: {errors or '-'}."
        )
    text = f"{one['text']}; {one['requests']} requests, {one['tokens']:.0f} tokens.\n\n"
    return (
        text
        + times
        + "\n`*`: the best of its kind.\n\n"
        + "\n".join(f"- {s}" for s in lines)
        + "\n"
    )


DEFINITIONS = f"""\
- **time**: from the first submit to the last output, of equal requests on every side: each
  generates exactly its number of tokens, which the predictor is not told. Tokens are sampled.
- **sides**: a static layout with a fixed draft length k, or with vLLM's dynamic schedule
  ({TABLE}); PAT without drafts, and with planned ones. All have one drafter, limits and router.
- **{TABLE}**: for each number of requests in a replica's step the k with the least time per token,
  by the engine's profile and by what each k gave in a batch that is not counted. Where weights
  change, one table for all.
- **ratio**: geometric mean over repeats of the ratio of the two times for one batch, with the
  percentile bootstrap's 95% confidence interval over repeats. "Best" is what has the lowest median.
- **steps**: shares of all steps by layout and draft length.
- **step error**: mean absolute error of predicted decode steps, relative to their real time; each
  was predicted before it was learnt from.
"""

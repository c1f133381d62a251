"""The benchmark's picture, drawn from the content of its JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench.runs import PAT

_STATIC_COLOURS = ("#3b75af", "#ef8636", "#519e3e", "#8d69b8", "#84584e")
_PAT_COLOUR = "#222222"
_FLOOR = 0.8
"""Lower end of the logarithmic axis, where 0 is drawn."""


def plot_bench(content: Mapping[str, Any], path: Path) -> None:
    """Save a PNG: time of each side relative to the better static layout, and one batch's course.

    The batch is the log-normal workload's, or else the first's, whose ratio is the median one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workloads = content["workloads"]
    layouts = content["settings"]["layouts"]
    colour = dict(zip(layouts, _STATIC_COLOURS, strict=False)) | {PAT: _PAT_COLOUR}
    figure = Figure(figsize=(10, 8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": [1, 1.05]})
    _bars(above, workloads, [*layouts, PAT], colour)
    shown = next(
        (workload for workload in workloads if workload["name"] == "lognormal"), workloads[0]
    )
    _course(below, shown, [*layouts, PAT], colour)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _bars(
    axes: Any,
    workloads: Sequence[Mapping[str, Any]],
    sides: Sequence[str],
    colour: Mapping[str, str],
) -> None:
    width = 0.8 / len(sides)
    for number, side in enumerate(sides):
        ratios = [workload["relative"][side] for workload in workloads]
        at = [place + (number - (len(sides) - 1) / 2) * width for place in range(len(workloads))]
        means = [ratio["centre"] for ratio in ratios]
        low = [max(0.0, ratio["centre"] - ratio["low"]) for ratio in ratios]
        high = [max(0.0, ratio["high"] - ratio["centre"]) for ratio in ratios]
        axes.bar(
            at,
            means,
            width=0.92 * width,
            color=colour[side],
            alpha=0.85,
            yerr=[low, high],
            error_kw={"elinewidth": 1.2, "capsize": 2.5, "ecolor": "#777777"},
            label="adaptive (PAT)" if side == PAT else _name(side),
        )
        for place, mean, more in zip(at, means, high, strict=True):
            axes.annotate(
                f"{mean:.2f}",
                (place, mean + more),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                fontweight="bold" if side == PAT else "normal",
            )
    top = max(ratio["high"] for workload in workloads for ratio in workload["relative"].values())
    axes.axhline(1.0, color="#777777", linewidth=0.8, zorder=0)
    axes.set_ylim(0, 1.22 * top)
    axes.set_xticks(
        range(len(workloads)), [workload["name"].replace("_", " ") for workload in workloads]
    )
    axes.set_ylabel("time of a batch /\nbetter static layout")
    axes.set_title(
        "The same batches on every side: geometric mean of paired ratios, 95% confidence interval",
        fontsize=10,
        loc="left",
    )
    axes.legend(fontsize=9, ncols=len(sides), loc="upper right")


def _course(
    axes: Any, workload: Mapping[str, Any], sides: Sequence[str], colour: Mapping[str, str]
) -> None:
    from matplotlib.patches import Patch

    runs = {run["side"]: run for run in workload["runs"] if run["repeat"] == workload["shown"]}
    most = max(live for run in runs.values() for _, live in run["live"])
    end = max(run["seconds"] for run in runs.values())
    adaptive = runs[PAT]
    for layout, start, stop in adaptive["spans"]:
        axes.axvspan(start, stop, color=colour.get(layout, "#999999"), alpha=0.15, linewidth=0)
    lines = []
    for side in sides:
        run = runs[side]
        rate = run["tokens"] / run["seconds"]
        name = "adaptive (PAT)" if side == PAT else _name(side)
        lines += axes.step(
            [at for at, _ in run["live"]],
            [max(live, _FLOOR) for _, live in run["live"]],
            where="post",
            color=colour[side],
            linewidth=2.2 if side == PAT else 1.6,
            label=f"{name}: {run['seconds']:.1f} s, {rate:.0f} tokens/s",
        )
    for switch in adaptive["switches"]:
        axes.axvline(switch["at"], color=_PAT_COLOUR, linewidth=1.0, alpha=0.7)
    used = dict.fromkeys(layout for layout, _, _ in adaptive["spans"])
    bands = [
        Patch(color=colour.get(layout, "#999999"), alpha=0.35, label=f"adaptive is in {layout}")
        for layout in used
    ]
    axes.legend(handles=[*lines, *bands], loc="upper right", fontsize=9)
    axes.set_yscale("log", base=2)
    axes.set_ylim(_FLOOR, most * 1.5)
    ticks = [2**power for power in range(most.bit_length())]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlim(0, end * 1.03)
    axes.set_ylabel("live requests (log scale)")
    axes.set_xlabel("time since the batch was submitted (s)")
    axes.grid(axis="y", alpha=0.25)
    count = len(adaptive["switches"])
    axes.set_title(
        f"One batch of {workload['name'].replace('_', ' ')}: {workload['requests']} requests, "
        f"{adaptive['tokens']:,} tokens, {count} switch{'' if count == 1 else 'es'}",
        fontsize=10,
        loc="left",
    )


def _name(layout: str) -> str:
    replicas = layout.rpartition("dp")[2]
    return f"static {layout}" + (" (one group)" if replicas == "1" else f" ({replicas} replicas)")

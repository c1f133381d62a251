"""The picture of the paper's settings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.batch_plot import POLICY_COLOURS
from benchmarks.paper.compare import PaperComparison
from benchmarks.paper.policy import PaperSetting


def plot_paper(results: Sequence[tuple[PaperSetting, PaperComparison]], path: Path) -> None:
    """Save a PNG: time of each policy relative to static tp2, with the range over batches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 1.5 + 1.1 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    first = results[0][1]
    labels = ["best static", *(row.label for row in first.others)]
    height = 0.8 / len(labels)
    for number, (setting, result) in enumerate(results):
        low = next(row for layout, row in result.static.items() if layout.tp >= 2)
        rows = [result.best_static, *result.others]
        shades = ("#519e3e", *POLICY_COLOURS)
        for index, (row, shade) in enumerate(zip(rows, shades, strict=True)):
            ratios = [
                run.seconds / base.seconds for run, base in zip(row.runs, low.runs, strict=True)
            ]
            median = statistics.median(ratios)
            axes.barh(
                number + (index - len(rows) / 2 + 0.5) * height,
                median,
                xerr=[[median - min(ratios)], [max(ratios) - median]],
                height=0.9 * height,
                color=shade,
                ecolor="#555555",
                label=labels[index] if not number else None,
            )
        if setting.generation is not None:
            axes.plot(
                [1 + setting.generation] * 2,
                [number - 0.42, number + 0.42],
                color="#c03d3e",
                linestyle=":",
                linewidth=2,
                label="published" if setting == _first_published(results) else None,
            )
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set_yticks(range(len(results)), [setting.title for setting, _ in results])
    axes.invert_yaxis()
    axes.set_xlabel("time of a batch relative to static tp2 (modelled; median and range)")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _first_published(results: Sequence[tuple[PaperSetting, PaperComparison]]) -> PaperSetting:
    return next(setting for setting, _ in results if setting.generation is not None)

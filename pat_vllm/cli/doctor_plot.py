"""The doctor's picture: every check, how it ended and what it took."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pat_vllm.doctor.values import Stage, Verdict
from pat_vllm.reporting.plot import LAYOUT_COLOURS, SWITCH_COLOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"passed": "#519e3e", "failed": "#c03d3e", "skipped": "#999999"}
_WIDTH = 105
_BAR = 0.22
"""Inches of a bar, with the space to the next."""


def plot(verdict: Verdict, path: Path) -> None:
    """Save a PNG: a line for each check, the verdict above, and below bars of what was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: list[tuple[str, str, str]] = []
    for stage in verdict.stages:
        seconds = f" ({stage.seconds:.0f} s)" if stage.seconds else ""
        why = f": {stage.why}" if stage.status == "skipped" else ""
        lines.append(
            (_COLOURS[stage.status], "bold", f"{stage.name}: {stage.status}{seconds}{why}")
        )
        for check in stage.checks:
            colour = _COLOURS["failed" if check.problem is not None else "passed"]
            text = f"{check.name}: {check.problem or check.found}"
            for number, line in enumerate(textwrap.wrap(text, _WIDTH)):
                lines.append((colour if not number else "none", "normal", f"   {line}"))
    title = textwrap.wrap(verdict.sentence, 85)[:4]
    moves, steps = _measured(verdict.stages)
    bars = max(len(moves), 2 * len(steps))
    below = bars * _BAR + 1.0 if bars else 0.0
    height = 0.24 * (len(lines) + 1.5 * len(title) + 3) + below
    figure = Figure(figsize=(11, height))
    FigureCanvasAgg(figure)
    step = 0.24 / height
    at = 1 - 1.5 * step
    for line in title:
        colour = _COLOURS["failed" if verdict.failed else "passed"]
        figure.text(0.02, at, line, fontsize=13, color=colour, weight="bold")
        at -= 1.4 * step
    figure.text(0.02, at, f"{verdict.date}  {verdict.command}"[:130], fontsize=8, color="#666666")
    at -= 1.4 * step
    for colour, weight, text in lines:
        if colour != "none":
            figure.text(0.02, at, "\N{BLACK CIRCLE}", fontsize=9, color=colour)
        figure.text(0.04, at, text, fontsize=9, weight=weight, parse_math=False)
        at -= step
    if bars:
        bottom, high = 0.35 / height, (below - 0.75) / height
        of_moves = [(label, [(100 * share, LAYOUT_COLOURS[0])]) for label, share in moves]
        axes = figure.add_axes((0.25, bottom, 0.24, high))
        _draw_bars(axes, of_moves, "share of a copy's speed", " %")
        of_steps = [
            (label, [(ours, SWITCH_COLOUR), (stock, "#b8b8b8")]) for label, ours, stock in steps
        ]
        axes = figure.add_axes((0.68, bottom, 0.27, high))
        _draw_bars(axes, of_steps, "decode step, ms, by requests: PAT (dark), stock vLLM", "")
    figure.savefig(path, dpi=110)


def _measured(
    stages: Sequence[Stage],
) -> tuple[list[tuple[str, float]], list[tuple[str, float, float]]]:
    """What moves, with its share of a copy's speed; steps, with ms of PAT and of stock vLLM."""
    checks = [check for stage in stages for check in stage.checks if check.problem is None]
    moves = [
        (f"{check.name}: {row['label']}", row["share_of_copy"])
        for check in checks
        for row in check.values.get("slowest", ())
    ]
    name = "decode step "
    steps = [
        (f"{check.name.removeprefix(name)}, {requests}", one["ms"][1], one["stock_ms"][1])
        for check in checks
        if check.name.startswith(name)
        for requests, one in check.values.items()
    ]
    return moves, steps


def _draw_bars(
    axes: Axes, rows: Sequence[tuple[str, Sequence[tuple[float, str]]]], title: str, unit: str
) -> None:
    """Labelled groups of bars of (length, colour)."""
    for number, (_, group) in enumerate(rows):
        for at, (value, colour) in enumerate(group):
            thick = 0.8 / len(group)
            y = number - 0.4 + (at + 0.5) * thick
            axes.barh(y, value, height=0.9 * thick, color=colour)
            axes.text(value, y, f" {value:.3g}{unit}", va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)

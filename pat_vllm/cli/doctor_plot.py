"""The doctor's picture: every check, how it ended and what it took."""

from __future__ import annotations

import textwrap
from pathlib import Path

from pat_vllm.doctor.values import Verdict

_COLOURS = {"passed": "#519e3e", "failed": "#c03d3e", "skipped": "#999999"}
_WIDTH = 105


def plot(verdict: Verdict, path: Path) -> None:
    """Save a PNG: a line for each check, and the verdict above."""
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
    height = 0.24 * (len(lines) + 1.5 * len(title) + 3)
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
    figure.savefig(path, dpi=110)

"""The picture of one batch under several policies."""

from __future__ import annotations

from pathlib import Path

from benchmarks.replaying import Comparison
from pat_vllm.reporting.plot import (
    LAYOUT_COLOURS,
    SWITCH_COLOUR,
    draw_live,
    draw_row,
    draw_switch_in_row,
    layout_colours,
    new_figure,
    scale_live,
)

__all__ = ["LAYOUT_COLOURS", "POLICY_COLOURS", "plot_comparison"]

POLICY_COLOURS = ("#c03d3e", "#d9a04e", "#222222", "#7f7f7f")
"""Of the policies that switch: PAT alone, or those of the paper's comparison in its order."""


def plot_comparison(result: Comparison, path: Path) -> None:
    """Save a PNG of the last batch: live requests above, layouts of every policy below."""
    colour = layout_colours(result.static)
    rows = [(row.label, row.runs[-1]) for row in result.results]
    lines = [
        *((row, colour[layout], 1.2) for layout, row in result.static.items()),
        *(
            (row, shade, 2.2 if shade == SWITCH_COLOUR else 1.2)
            for row, shade in zip(result.others, _shades(result), strict=True)
        ),
    ]
    end = max(run.seconds for _, run in rows)
    most = max(sample.num_seqs for _, run in rows for sample in run.timeline)

    figure, (above, below) = new_figure(11, [5, 0.4 * len(rows)], 0)
    from matplotlib.patches import Patch

    kind = "modelled step times" if result.modelled else "measured step times"
    figure.suptitle(f"Simulated, {kind}: {result.title}", fontsize=11, wrap=True)

    for row, shade, width in lines:
        run = row.runs[-1]
        draw_live(
            above,
            [(sample.at - run.began, sample.num_seqs) for sample in run.timeline],
            color=shade,
            linewidth=width,
            linestyle="--" if row.label.startswith("clairvoyant") else "-",
            label=f"{row.label}: {run.seconds:.1f} s",
        )
    scale_live(above, most)
    above.legend(loc="upper right", fontsize=8)

    for number, (_, run) in enumerate(rows):
        draw_row(below, number, run.spans, colour)
        for switch in run.switches:
            draw_switch_in_row(below, number, switch.at - run.began, switch.seconds, end)
        below.text(run.seconds, number, f" {run.seconds:.1f} s", va="center", fontsize=8)
    below.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    below.invert_yaxis()
    below.set_xlim(0, end * 1.08)
    below.set_xlabel("time since the batch was submitted (s); black: switches")
    below.legend(
        handles=[Patch(color=shade, alpha=0.75, label=str(one)) for one, shade in colour.items()],
        title="layout",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        fontsize=8,
    )
    figure.savefig(path, dpi=130)


def _shades(result: Comparison) -> tuple[str, ...]:
    return (SWITCH_COLOUR,) if len(result.others) == 1 else POLICY_COLOURS

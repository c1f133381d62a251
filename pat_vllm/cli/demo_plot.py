"""The demo's picture: live requests and layouts over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pat_vllm.cli.engine_run import RunResult
from pat_vllm.reporting.plot import (
    SWITCH_COLOUR,
    draw_drafts,
    draw_live,
    draw_row,
    draw_switch,
    draw_switch_in_row,
    layout_bands,
    layout_colours,
    new_figure,
    scale_live,
)

__all__ = ["draw_drafts", "plot"]


def plot(results: Sequence[tuple[str, RunResult]], path: Path) -> None:
    """Save a PNG of (label, run) pairs; a run that switches is the last.

    Above, live requests of each run; behind them the layouts of the last. Below, layouts of all,
    and if the last run speculated its draft lengths and what was accepted.
    """
    colour = layout_colours(layout for _, result in results for layout, _, _ in result.spans)
    _, last = results[-1]
    most = max(count for _, result in results for _, count in result.live)
    end = max(result.seconds for _, result in results)

    heights = [4, 0.35 * len(results) + 0.2] + [1.2] * bool(last.drafts)
    figure, panels = new_figure(10, heights)
    above, below = panels[:2]
    figure.suptitle(
        f"One long-tail batch, {len(results)} ways: {len(last.outputs)} requests, "
        f"{last.tokens:,} tokens, {min(colour).world_size} ranks",
        fontsize=13,
    )

    bands = layout_bands(above, last.spans, colour)
    for label, result in results:
        switching = result is last
        draw_live(
            above,
            result.live,
            color=SWITCH_COLOUR if switching else colour[result.spans[0][0]],
            linewidth=2.2 if switching else 1.6,
            label=f"{label}: {_speed(result)}",
        )
    for number, switch in enumerate(last.switches):
        at = switch.at - last.began
        # The text has what it took.
        draw_switch(above, at, switch.seconds, end)
        above.annotate(
            f"switch {switch.source} → {switch.target}\n{switch.num_seqs} live, "
            f"{switch.seconds * 1e3:.0f} ms",
            (at, most / 2 ** (1 + number)),
            xytext=(8, 0),
            textcoords="offset points",
            fontsize=9,
        )
    scale_live(above, most)
    lines, _ = above.get_legend_handles_labels()
    above.legend(handles=[*lines, *bands], loc="upper right", fontsize=9)

    for row, (_, result) in enumerate(results):
        draw_row(below, row, result.spans, colour)
        for switch in result.switches:
            draw_switch_in_row(below, row, switch.at - result.began, switch.seconds, end)
        below.text(result.seconds, row, f" {result.seconds:.1f} s", va="center", fontsize=9)
    below.set_yticks(range(len(results)), [label for label, _ in results])
    below.invert_yaxis()
    below.set_xlim(0, end * 1.06)
    if last.drafts:
        draw_drafts(panels[2], last.drafts, last.began, last.seconds)
    panels[-1].set_xlabel("time since the batch was submitted (s)")
    below.set_title("layout over time", fontsize=10, loc="left")
    figure.savefig(path, dpi=150)


def _speed(result: RunResult) -> str:
    speed = f"{result.seconds:.1f} s, {result.tokens / result.seconds:.0f} tokens/s"
    return speed + (f", {result.acceptance:.0%} of drafts accepted" if result.drafted else "")

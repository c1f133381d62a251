"""The demo's picture: live requests and layouts over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pat_vllm.cli.engine_run import RunResult
from pat_vllm.layout import Layout
from pat_vllm.reporting import DraftSample, drafts_over_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LAYOUT_COLOURS = ("#3b75af", "#ef8636", "#519e3e", "#8d69b8", "#84584e")
_SWITCHING_COLOUR = "#222222"
_ACCEPTANCE_COLOUR = "#c03d3e"


def plot(results: Sequence[tuple[str, RunResult]], path: Path) -> None:
    """Save a PNG of (label, run) pairs; a run that switches is the last.

    Above, live requests of each run; behind them the layouts of the last. Below, layouts of all,
    and if the last run speculated its draft lengths and what was accepted.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    layouts = sorted({layout for _, result in results for layout, _, _ in result.spans})
    colour = dict(zip(layouts, _LAYOUT_COLOURS, strict=False))
    _, last = results[-1]
    most = max(count for _, result in results for _, count in result.live)
    end = max(result.seconds for _, result in results)

    heights = [4, 0.35 * len(results) + 0.2] + [1.2] * bool(last.drafts)
    figure = Figure(figsize=(10, sum(heights) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights})
    above, below = panels[:2]
    figure.suptitle(
        f"One long-tail batch, {len(results)} ways: {len(last.outputs)} requests, "
        f"{last.tokens:,} tokens, {layouts[0].world_size} ranks",
        fontsize=13,
    )

    for layout, start, stop in last.spans:
        above.axvspan(start, stop, color=colour[layout], alpha=0.13, linewidth=0)
    for label, result in results:
        switching = result is last
        above.step(
            [at for at, _ in result.live],
            [max(count, _FLOOR) for _, count in result.live],
            where="post",
            color=_SWITCHING_COLOUR if switching else colour[result.spans[0][0]],
            linewidth=2.2 if switching else 1.6,
            label=f"{label}: {_speed(result)}",
        )
    for number, switch in enumerate(last.switches):
        at = switch.at - last.began
        # Widened where it would be too thin to be seen; the text has the number.
        above.axvspan(at, at + max(switch.seconds, end / 500), color=_SWITCHING_COLOUR, alpha=0.8)
        above.annotate(
            f"switch {switch.source} → {switch.target}\n{switch.num_seqs} live, "
            f"{switch.seconds * 1e3:.0f} ms",
            (at, most / 2 ** (1 + number)),
            xytext=(8, 0),
            textcoords="offset points",
            fontsize=9,
        )
    above.set_yscale("log", base=2)
    above.set_ylim(_FLOOR, most * 1.5)
    ticks = [2**power for power in range(most.bit_length())]
    above.set_yticks(ticks, [str(tick) for tick in ticks])
    above.set_ylabel("live requests (log scale)")
    above.grid(axis="y", alpha=0.25)
    lines, _ = above.get_legend_handles_labels()
    bands = [Patch(color=colour[layout], alpha=0.35, label=_name(layout)) for layout in layouts]
    above.legend(handles=[*lines, *bands], loc="upper right", fontsize=9)

    for row, (_, result) in enumerate(results):
        for layout, start, stop in result.spans:
            below.barh(row, stop - start, left=start, height=0.7, color=colour[layout], alpha=0.75)
        for switch in result.switches:
            width = max(switch.seconds, end / 500)
            below.barh(row, width, left=switch.at - result.began, height=0.9, color="#222222")
        below.text(result.seconds, row, f" {result.seconds:.1f} s", va="center", fontsize=9)
    below.set_yticks(range(len(results)), [label for label, _ in results])
    below.invert_yaxis()
    below.set_xlim(0, end * 1.06)
    if last.drafts:
        draw_drafts(panels[2], last.drafts, last.began, last.seconds)
    panels[-1].set_xlabel("time since the batch was submitted (s)")
    below.set_title("layout over time", fontsize=10, loc="left")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


_FLOOR = 0.8
"""Lower end of the logarithmic axis, where 0 is drawn."""


def draw_drafts(
    axes: Axes, samples: Sequence[DraftSample], began: float, seconds: float, width: float = 1.0
) -> None:
    """Draft length (left) and accepted share (right) over time, in intervals of `width` seconds."""
    means = drafts_over_time(samples, began, width)
    ends = [min(one.end, seconds) for one in means]
    for one, end in zip(means, ends, strict=True):
        axes.hlines(one.num_speculative_tokens, one.start, end, _SWITCHING_COLOUR, linewidth=2.2)
    axes.set_ylim(0, 1.15 * max(1.0, *(one.num_speculative_tokens for one in means)))
    axes.set_ylabel("draft length k")
    axes.set_title(
        "mean draft length (lines) and accepted share of the drafts (dots), "
        + ("each second" if width == 1 else f"every {width:.3g} s"),
        fontsize=10,
        loc="left",
    )
    shares = axes.twinx()
    for one, end in zip(means, ends, strict=True):
        if one.acceptance is not None:
            middle = 0.5 * (one.start + end)
            shares.plot(middle, one.acceptance, "o", color=_ACCEPTANCE_COLOUR, markersize=4)
    shares.set_ylim(0, 1.15)
    shares.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"], color=_ACCEPTANCE_COLOUR)
    shares.spines["top"].set_visible(False)


def _name(layout: Layout) -> str:
    groups = "one group" if layout.replicas == 1 else f"{layout.replicas} replicas"
    return f"layout {layout}: {groups} of tp={layout.tp}"


def _speed(result: RunResult) -> str:
    speed = f"{result.seconds:.1f} s, {result.tokens / result.seconds:.0f} tokens/s"
    return speed + (f", {result.acceptance:.0%} of drafts accepted" if result.drafted else "")

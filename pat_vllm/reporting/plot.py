"""Pictures of what an engine did: requests, layouts, draft lengths, switches and savings over time.

Commands draw their own pictures with the same parts. matplotlib is imported when one is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.layout import Layout
from pat_vllm.reporting.drafts import drafts_over_time
from pat_vllm.reporting.text import summary, times_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pat_vllm.reporting.values import DraftSample, LiveSample, Report

LAYOUT_COLOURS = ("#3b75af", "#ef8636", "#519e3e", "#8d69b8", "#84584e")
SWITCH_COLOUR = "#222222"
ACCEPTANCE_COLOUR = "#c03d3e"
SAVING_COLOUR = "#519e3e"
FLOOR = 0.8
"""Lower end of the logarithmic axis of live requests, where 0 is drawn."""
_MOST_NOTES = 8
"""More switches than this, and the picture does not describe each in words."""
_MOST_BINS = 100
"""Intervals into which the time is divided for draft lengths, unless they are shorter than 1 s."""

Span = tuple[Layout, float, float]
"""A layout, from when and until when, in seconds."""


def new_figure(
    width: float, heights: Sequence[float], margin: float = 0.8, same_time: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure of panels, one below the other.

    Args:
        width, heights, margin: inches; a height for each panel.
        same_time: whether the panels have their horizontal axis in common.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"pictures need matplotlib, which is not installed here ({error}): "
            "pip install 'matplotlib>=3.8'"
        ) from error
    figure = Figure(figsize=(width, sum(heights) + margin), layout="constrained")
    FigureCanvasAgg(figure)  # of its own: whatever backend the process has chosen
    panels = figure.subplots(
        len(heights),
        1,
        sharex=same_time,
        squeeze=False,
        gridspec_kw={"height_ratios": list(heights)},
    )
    for axes in panels[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels[:, 0])


def layout_colours(layouts: Iterable[Layout]) -> dict[Layout, str]:
    """A colour for each layout, the narrowest first."""
    return dict(zip(sorted(set(layouts)), LAYOUT_COLOURS, strict=False))


def layout_name(layout: Layout) -> str:
    """Its name, and what it is."""
    groups = "one group" if layout.replicas == 1 else f"{layout.replicas} replicas"
    return f"layout {layout}: {groups} of tp={layout.tp}"


def layout_bands(axes: Axes, spans: Iterable[Span], colour: Mapping[Layout, str]) -> list[Any]:
    """Colour the background by layout. Returns entries for a legend, one for each of `colour`."""
    from matplotlib.patches import Patch

    for layout, start, stop in spans:
        axes.axvspan(start, stop, color=colour[layout], alpha=0.13, linewidth=0)
    return [Patch(color=shade, alpha=0.35, label=layout_name(one)) for one, shade in colour.items()]


def draw_live(axes: Axes, live: Iterable[tuple[float, float]], **line: Any) -> None:
    """Live requests over time: pairs of (seconds, requests from then on)."""
    at, counts = zip(*live, strict=True)
    axes.step(at, [max(count, FLOOR) for count in counts], where="post", **line)


def scale_live(axes: Axes, most: int) -> None:
    """A logarithmic axis of live requests, of which there are `most`."""
    axes.set_yscale("log", base=2)
    axes.set_ylim(FLOOR, most * 1.5)
    ticks = [2**power for power in range(most.bit_length())]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylabel("live requests (log scale)")
    axes.grid(axis="y", alpha=0.25)


def draw_switch(axes: Axes, at: float, seconds: float, end: float) -> None:
    """A switch that began at `at`. One too thin to be seen on an axis up to `end` is widened."""
    axes.axvspan(at, at + max(seconds, end / 500), color=SWITCH_COLOUR, alpha=0.8)


def draw_row(axes: Axes, row: int, spans: Iterable[Span], colour: Mapping[Layout, str]) -> None:
    """Layouts over time as a bar at the height `row`."""
    for layout, start, stop in spans:
        axes.barh(row, stop - start, left=start, height=0.7, color=colour[layout], alpha=0.75)


def draw_switch_in_row(axes: Axes, row: int, at: float, seconds: float, end: float) -> None:
    """`draw_switch`, on a bar of `draw_row`."""
    axes.barh(row, max(seconds, end / 500), left=at, height=0.9, color=SWITCH_COLOUR)


def draw_drafts(
    axes: Axes, samples: Sequence[DraftSample], began: float, seconds: float, width: float = 1.0
) -> None:
    """Draft length (left) and accepted share (right) over time, in intervals of `width` seconds."""
    means = drafts_over_time(samples, began, width)
    ends = [min(one.end, seconds) for one in means]
    for one, end in zip(means, ends, strict=True):
        axes.hlines(one.num_speculative_tokens, one.start, end, SWITCH_COLOUR, linewidth=2.2)
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
            shares.plot(middle, one.acceptance, "o", color=ACCEPTANCE_COLOUR, markersize=4)
    shares.set_ylim(0, 1.15)
    shares.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"], color=ACCEPTANCE_COLOUR)
    shares.spines["top"].set_visible(False)


# -------------------------------------------------------------------- a report


def plot_report(report: Report, path: Path) -> None:
    """Draw a report; for the errors, see `Report.plot`."""
    if not any(sample.num_seqs for sample in report.timeline):
        raise ValueError("the report has no requests to draw")
    began, end = times_of(report)
    spans = _spans(report, began, end)
    switches = [one for one in report.switches if one.at >= began and one.reason != "idle"]
    drafts = [one for one in report.drafts if one.at >= began]
    savings = [one for one in report.predictor.savings if one.at >= began]
    costs = bool(switches or savings)

    figure, panels = new_figure(10, [4, *[1.2] * bool(drafts), *[1.8] * costs])
    figure.suptitle(summary(report).replace("; saved", "\nsaved"), fontsize=11)
    above = panels[0]
    colour = layout_colours(layout for layout, _, _ in spans)
    bands = layout_bands(above, spans, colour)
    _draw_replicas(above, report.timeline, began, end)
    most = max(sample.num_seqs for sample in report.timeline)
    live = [(sample.at - began, sample.num_seqs) for sample in report.timeline]
    live += [(one.at - began, 0) for one in report.switches if one.reason == "idle"]
    live += [(one.at - began, 0) for one in savings]
    live = sorted((at, count) for at, count in live if at >= 0)
    line: dict[str, Any] = dict(color=SWITCH_COLOUR, linewidth=2.0, label="live requests")
    draw_live(above, [*live, (end, live[-1][1])], **line)
    for number, one in enumerate(switches):
        draw_switch(above, one.at - began, one.seconds, end)
        if len(switches) <= _MOST_NOTES:
            late = one.at - began > 0.75 * end
            above.annotate(
                f"{one.source} → {one.target}\n{one.num_seqs} live, {one.seconds * 1e3:.0f} ms",
                (one.at - began, most / 2 ** (number % 2)),
                xytext=(-6 if late else 8, 0),
                textcoords="offset points",
                ha="right" if late else "left",
                fontsize=8,
                bbox={"color": "white", "alpha": 0.7, "pad": 1},
            )
    scale_live(above, most)
    lines, _ = above.get_legend_handles_labels()
    if drafts:
        draw_drafts(panels[1], drafts, began, end, max(1.0, end / _MOST_BINS))
    if costs:
        _draw_costs(panels[-1], report, began)
        points, _ = panels[-1].get_legend_handles_labels()
        lines += points
    # Outside of the panels, where it hides nothing.
    figure.legend(handles=[*lines, *bands], loc="outside lower center", ncols=3, fontsize=8)
    panels[-1].set_xlim(0, end)
    panels[-1].set_xlabel("time since the first request (s)")
    figure.savefig(path, dpi=150)


def _spans(report: Report, began: float, end: float) -> list[Span]:
    """Layouts one after another, in seconds since `began`."""
    seen = [(one.at, one.layout) for one in report.timeline]
    seen += [(one.at, one.target) for one in report.switches]
    changes: list[tuple[Layout, float]] = []
    for at, layout in sorted(seen, key=itemgetter(0)):
        if at <= began:
            changes = [(layout, 0.0)]
        elif not changes or changes[-1][0] != layout:
            changes.append((layout, at - began))
    stops = [start for _, start in changes[1:]] + [end]
    return [(one, start, stop) for (one, start), stop in zip(changes, stops, strict=True)]


def _draw_replicas(axes: Axes, timeline: Sequence[LiveSample], began: float, end: float) -> None:
    """A thin line for each replica, where the requests of each are known."""
    most = max(len(sample.by_replica) for sample in timeline)
    for replica in range(most):
        counts = [
            max(FLOOR, sample.by_replica[replica]) if replica < len(sample.by_replica) else math.nan
            for sample in timeline
        ]
        axes.step(
            [*(sample.at - began for sample in timeline), end],
            [*counts, counts[-1]],
            where="post",
            color=SWITCH_COLOUR,
            linewidth=0.7,
            alpha=0.45,
            label="of each replica" if replica == 0 else None,
        )


def _draw_costs(axes: Axes, report: Report, began: float) -> None:
    """What switches took and were to save, and what was saved in each batch."""
    fired = [one for one in report.predictor.decisions if one.fired and one.at >= began]
    savings = [one for one in report.predictor.savings if one.at >= began]
    switches = [one for one in report.switches if one.at >= began and one.reason != "idle"]
    kinds: list[tuple[str, list[tuple[float, float]], dict[str, Any]]] = [
        (
            "switch: what it took",
            [(s.at, s.seconds) for s in switches],
            {"marker": "o", "markersize": 5},
        ),
        (
            "switch: predicted saving, its cost paid",
            [(d.at, d.saving) for d in fired],
            {"marker": "^", "markersize": 7, "markerfacecolor": "none"},
        ),
        (
            "batch: predicted saving",
            [(b.at, b.predicted.fixed - b.predicted.drafting) for b in savings],
            {"marker": "D", "markersize": 8, "markerfacecolor": "none", "color": SAVING_COLOUR},
        ),
        (
            "batch: saving as it came (estimated)",
            [(b.at, b.realised.fixed - b.realised.drafting) for b in savings],
            {"marker": "D", "markersize": 4, "color": SAVING_COLOUR},
        ),
    ]
    for label, points, style in kinds:
        points = [(at - began, value) for at, value in points if math.isfinite(value)]
        if points:
            at, values = zip(*points, strict=True)
            look = {"color": SWITCH_COLOUR, "linestyle": "", "clip_on": False, **style}
            axes.plot(at, values, label=label, **look)
    axes.axhline(0, color="#999999", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(y=0.15)
    axes.set_ylabel("seconds")
    axes.set_title("switches and batches: seconds taken and saved", fontsize=10, loc="left")
    axes.grid(axis="y", alpha=0.25)

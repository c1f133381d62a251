"""Pictures of what an engine did: requests, layouts, draft lengths, switches and steps over time.

Of a report, of several runs of one batch, and the parts that others draw with. matplotlib is
imported when one is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.layout import Layout
from pat_vllm.reporting.run import Run, Span, drafts_over_time
from pat_vllm.reporting.text import summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pat_vllm.reporting.values import DraftSample, Report, SwitchReport

LAYOUT_COLOURS = ("#3b75af", "#ef8636", "#519e3e", "#8d69b8", "#84584e")
SWITCH_COLOUR = "#222222"
ACCEPTANCE_COLOUR = "#c03d3e"
PREDICTED_COLOUR = "#519e3e"
FLOOR = 0.8
"""Lower end of the logarithmic axis of live requests, where 0 is drawn."""
_MOST_NOTES = 8
"""More switches than this, and the picture does not describe each in words."""
_WIDTH, _MARGIN = 10.0, 0.8
"""Of pictures, and what is above and below their panels: inches."""
_MOST_BINS = 100
"""Intervals into which the time is divided for draft lengths, unless they are shorter than 1 s."""


def new_figure(heights: Sequence[float], same_time: bool = True) -> tuple[Figure, list[Axes]]:
    """A figure of panels, one below the other.

    Args:
        heights: of each panel, inches.
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
            "pip install 'pat-vllm[plot]'"
        ) from error
    figure = Figure(figsize=(_WIDTH, sum(heights) + _MARGIN), layout="constrained")
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


def layout_bands(axes: Axes, spans: Iterable[Span], colour: Mapping[Layout, str]) -> list[Any]:
    """Colour the background by layout. Returns entries for a legend, one for each of `colour`."""
    from matplotlib.patches import Patch

    for layout, start, stop in spans:
        axes.axvspan(start, stop, color=colour[layout], alpha=0.13, linewidth=0)
    entries = []
    for legend_layout, shade in colour.items():
        groups = (
            "one group" if legend_layout.replicas == 1 else f"{legend_layout.replicas} replicas"
        )
        label = f"layout {legend_layout}: {groups} of tp={legend_layout.tp}"
        entries.append(Patch(color=shade, alpha=0.35, label=label))
    return entries


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


def draw_drafts(
    axes: Axes, samples: Sequence[DraftSample], began: float, seconds: float, width: float = 1.0
) -> None:
    """Draft length (left) and accepted share (right) over time, in intervals of `width` seconds."""
    means = drafts_over_time(samples, began, width)
    ends = [min(mean.end, seconds) for mean in means]
    for mean, end in zip(means, ends, strict=True):
        axes.hlines(mean.num_speculative_tokens, mean.start, end, SWITCH_COLOUR, linewidth=2.2)
    axes.set_ylim(0, 1.15 * max(1.0, *(mean.num_speculative_tokens for mean in means)))
    axes.set_ylabel("draft length k")
    axes.set_title(
        "mean draft length (lines) and accepted share of the drafts (dots), "
        + ("each second" if width == 1 else f"every {width:.3g} s"),
        fontsize=10,
        loc="left",
    )
    shares = axes.twinx()
    for mean, end in zip(means, ends, strict=True):
        if mean.acceptance is not None:
            middle = 0.5 * (mean.start + end)
            shares.plot(middle, mean.acceptance, "o", color=ACCEPTANCE_COLOUR, markersize=4)
    shares.set_ylim(0, 1.15)
    shares.set_yticks([0, 0.5, 1], ["0%", "50%", "100%"], color=ACCEPTANCE_COLOUR)
    shares.spines["top"].set_visible(False)


# -------------------------------------------------------------------- a report


def plot_report(report: Report, path: Path) -> None:
    """Draw a report; for the errors, see `Report.plot`."""
    if not any(sample.num_seqs for sample in report.timeline):
        raise ValueError("the report has no requests to draw")
    run = Run.of(report)
    switches, drafts, end = run.switches, run.drafts, run.seconds
    costs = bool(switches)

    figure, panels = new_figure([4, *[1.2] * bool(drafts), *[1.8] * costs])
    figure.suptitle(summary(report), fontsize=11)
    above = panels[0]
    spans = run.spans
    bands = layout_bands(above, spans, layout_colours(layout for layout, _, _ in spans))
    _draw_replicas(above, run)
    draw_live(above, run.live, color=SWITCH_COLOUR, linewidth=2.0, label="live requests")
    most = max(sample.num_seqs for sample in report.timeline)
    for number, switch in enumerate(switches):
        draw_switch(above, switch.at - run.began, switch.seconds, end)
        if len(switches) <= _MOST_NOTES:
            _note(above, switch, run, most / 2 ** (number % 2))
    scale_live(above, most)
    lines, _ = above.get_legend_handles_labels()
    if drafts:
        draw_drafts(panels[1], drafts, run.began, end, max(1.0, end / _MOST_BINS))
    if costs:
        _draw_costs(panels[-1], run)
        points, _ = panels[-1].get_legend_handles_labels()
        lines += points
    # Outside of the panels, where it hides nothing.
    figure.legend(handles=[*lines, *bands], loc="outside lower center", ncols=3, fontsize=8)
    panels[-1].set_xlim(0, end)
    panels[-1].set_xlabel("time since the first request (s)")
    figure.savefig(path, dpi=150)


def _note(axes: Axes, switch: SwitchReport, run: Run, height: float) -> None:
    """Describe a switch in words."""
    at = switch.at - run.began
    late = at > 0.75 * run.seconds
    axes.annotate(
        f"{switch.source} → {switch.target}\n{switch.num_seqs} live, {switch.seconds * 1e3:.0f} ms",
        (at, height),
        xytext=(-6 if late else 8, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        fontsize=8,
        bbox={"color": "white", "alpha": 0.7, "pad": 1},
    )


def _draw_replicas(axes: Axes, run: Run) -> None:
    """A thin line for each replica, where the requests of each are known."""
    timeline = run.report.timeline
    most = max(len(sample.by_replica) for sample in timeline)
    for replica in range(most):
        counts = [
            max(FLOOR, sample.by_replica[replica]) if replica < len(sample.by_replica) else math.nan
            for sample in timeline
        ]
        axes.step(
            [*(sample.at - run.began for sample in timeline), run.seconds],
            [*counts, counts[-1]],
            where="post",
            color=SWITCH_COLOUR,
            linewidth=0.7,
            alpha=0.45,
            label="of each replica" if replica == 0 else None,
        )


def _draw_costs(axes: Axes, run: Run) -> None:
    """What switches took, and step times after each, predicted and real."""
    fired = [
        decision
        for decision in run.report.predictor.decisions
        if decision.fired and run.during(decision.at)
    ]
    kinds: list[tuple[str, list[tuple[float, float]], dict[str, Any]]] = [
        (
            "switch: what it took",
            [(s.at, s.seconds) for s in run.switches],
            {"marker": "o", "markersize": 5},
        ),
        (
            "step after a switch: predicted",
            [(d.at, d.step_after) for d in fired],
            {
                "marker": "D",
                "markersize": 8,
                "markerfacecolor": "none",
                "color": PREDICTED_COLOUR,
            },
        ),
        (
            "step after a switch: real",
            [(d.at, d.real_after) for d in fired if d.real_after is not None],
            {"marker": "D", "markersize": 4, "color": PREDICTED_COLOUR},
        ),
    ]
    for label, points, style in kinds:
        points = [(at - run.began, value) for at, value in points if math.isfinite(value)]
        if points:
            at, values = zip(*points, strict=True)
            look = {"color": SWITCH_COLOUR, "linestyle": "", "clip_on": False, **style}
            axes.plot(at, values, label=label, **look)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(y=0.15)
    axes.set_ylabel("seconds")
    axes.set_title("switches, and steps after them: seconds", fontsize=10, loc="left")
    axes.grid(axis="y", alpha=0.25)


# -------------------------------------------------------------------- one batch, several runs


def plot_runs(title: str, runs: Sequence[tuple[str, str, Run]], path: Path) -> None:
    """Save a PNG of (name, what to say of it, run); one that switches is the last.

    Above, live requests of each run; behind them the layouts of the last. Below, layouts of all,
    and if the last run speculated its draft lengths and what was accepted.
    """
    colour = layout_colours(layout for *_, run in runs for layout, _, _ in run.spans)
    *_, last = runs[-1]
    most = max(count for *_, run in runs for _, count in run.live)
    end = max(run.seconds for *_, run in runs)

    heights = [4, 0.35 * len(runs) + 0.2] + [1.2] * bool(last.drafts)
    figure, panels = new_figure(heights)
    above, below = panels[:2]
    figure.suptitle(title, fontsize=13)
    bands = layout_bands(above, last.spans, colour)
    for row, (name, said, run) in enumerate(runs):
        spans, switching = run.spans, run is last
        draw_live(
            above,
            run.live,
            color=SWITCH_COLOUR if switching else colour[spans[0][0]],
            linewidth=2.2 if switching else 1.6,
            label=f"{name}: {said}",
        )
        for layout, start, stop in spans:
            below.barh(row, stop - start, left=start, height=0.7, color=colour[layout], alpha=0.75)
        for switch in run.switches:
            width = max(switch.seconds, end / 500)
            below.barh(row, width, left=switch.at - run.began, height=0.9, color=SWITCH_COLOUR)
        below.text(run.seconds, row, f" {run.seconds:.1f} s", va="center", fontsize=9)
    for number, switch in enumerate(last.switches):
        draw_switch(above, switch.at - last.began, switch.seconds, end)
        _note(above, switch, last, most / 2 ** (1 + number))
    scale_live(above, most)
    lines, _ = above.get_legend_handles_labels()
    above.legend(handles=[*lines, *bands], loc="upper right", fontsize=9)
    below.set_yticks(range(len(runs)), [name for name, *_ in runs])
    below.invert_yaxis()
    below.set_xlim(0, end * 1.06)
    if last.drafts:
        draw_drafts(panels[2], last.drafts, last.began, last.seconds)
    panels[-1].set_xlabel("time since the batch was submitted (s)")
    below.set_title("layout over time", fontsize=10, loc="left")
    figure.savefig(path, dpi=150)

"""The simulator's picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pat_vllm.layout import Layout
from pat_vllm.simulator.compare import Comparison
from pat_vllm.simulator.run import SimulatedRun

LAYOUT_COLOURS = ("#3b75af", "#ef8636", "#519e3e", "#8d69b8", "#84584e")
_SWITCH_COLOUR = "#222222"
POLICY_COLOURS = ("#c03d3e", "#d9a04e", "#222222", "#7f7f7f")
"""Of the policies that switch: PAT alone, or those of the paper's comparison in its order."""
_FLOOR = 0.8
"""Lower end of the logarithmic axis, where 0 is drawn."""


def plot_comparison(result: Comparison, path: Path) -> None:
    """Save a PNG of the last batch: live requests above, layouts of every policy below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colour = dict(zip(sorted(result.static), LAYOUT_COLOURS, strict=False))
    rows = [(row.label, row.runs[-1]) for row in result.results]
    lines = [
        *((row, colour[layout], 1.2) for layout, row in result.static.items()),
        *(
            (row, shade, 2.2 if shade == _SWITCH_COLOUR else 1.2)
            for row, shade in zip(result.others, _shades(result), strict=True)
        ),
    ]
    end = max(run.seconds for _, run in rows)
    most = max(sample.num_seqs for _, run in rows for sample in run.timeline)

    figure = Figure(figsize=(11, 5 + 0.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [5, 0.4 * len(rows)]}
    )
    kind = "modelled step times" if result.modelled else "measured step times"
    figure.suptitle(f"Simulated, {kind}: {result.title}", fontsize=11, wrap=True)

    for row, shade, width in lines:
        run = row.runs[-1]
        above.step(
            [sample.at - run.began for sample in run.timeline],
            [max(sample.num_seqs, _FLOOR) for sample in run.timeline],
            where="post",
            color=shade,
            linewidth=width,
            linestyle="--" if row.label.startswith("clairvoyant") else "-",
            label=f"{row.label}: {run.seconds:.1f} s",
        )
    above.set_yscale("log", base=2)
    above.set_ylim(_FLOOR, most * 1.5)
    ticks = [2**power for power in range(most.bit_length())]
    above.set_yticks(ticks, [str(tick) for tick in ticks])
    above.set_ylabel("live requests (log scale)")
    above.grid(axis="y", alpha=0.25)
    above.legend(loc="upper right", fontsize=8)

    for number, (_, run) in enumerate(rows):
        for layout, start, stop in spans(run):
            below.barh(
                number, stop - start, left=start, height=0.7, color=colour[layout], alpha=0.75
            )
        for switch in run.switches:
            # Widened where it would be too thin to be seen.
            width = max(switch.seconds, end / 500)
            below.barh(number, width, left=switch.at - run.began, height=0.9, color=_SWITCH_COLOUR)
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
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def spans(run: SimulatedRun) -> Iterator[tuple[Layout, float, float]]:
    """(layout, start, stop) of a run, seconds since it began; switches belong to their source."""
    layout, start = run.timeline[0].layout, 0.0
    for switch in run.switches:
        stop = switch.at + switch.seconds - run.began
        yield layout, start, stop
        layout, start = switch.target, stop
    yield layout, start, run.seconds


def _shades(result: Comparison) -> tuple[str, ...]:
    return (_SWITCH_COLOUR,) if len(result.others) == 1 else POLICY_COLOURS

"""The picture of `pat-vllm advise`."""

from __future__ import annotations

from pathlib import Path

from pat_vllm.advice.text import heading, rows, verdict
from pat_vllm.advice.verdict import Advice
from pat_vllm.cli.simulate_plot import LAYOUT_COLOURS, spans

_OURS, _STATIC, _OTHER = "#222222", "#7f7f7f", "#b8b8b8"
_FLOOR = 0.8
"""Lower end of the logarithmic axis, where 0 is drawn."""


def plot_advice(advice: Advice, path: Path) -> None:
    """Save a PNG: the last iteration under PAT and in the best static layout above, the time of an
    iteration on every side below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    kind = "modelled" if advice.modelled else "simulated"
    sides = list(rows(advice))
    colour = dict(zip(advice.rollouts.profile.all_layouts, LAYOUT_COLOURS, strict=False))
    figure = Figure(figsize=(10, 6 + 0.3 * len(sides)), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": [5, 0.5 * len(sides) + 0.5]})
    figure.suptitle(f"{heading(advice)}\n{verdict(advice)}", fontsize=9, wrap=True)

    ours, static = advice.ours.result.runs[-1], advice.sides.static.result.runs[-1]
    for layout, start, stop in spans(ours):
        above.axvspan(start, stop, color=colour[layout], alpha=0.2, linewidth=0)
    for label, run, shade in (("best static", static, _STATIC), ("PAT", ours, _OURS)):
        above.step(
            [sample.at - run.began for sample in run.timeline],
            [max(sample.num_seqs, _FLOOR) for sample in run.timeline],
            where="post",
            color=shade,
            label=f"{label}: {run.seconds:.1f} s ({kind})",
        )
    above.set_yscale("log", base=2)
    above.set_ylim(_FLOOR, len(ours.finished) * 1.5)
    above.set_ylabel("live requests (log scale)")
    above.set_xlabel("time since the last iteration's requests were submitted (s)")
    lines = above.legend(loc="upper right", fontsize=8)
    above.add_artist(lines)
    used = {layout for layout, _, _ in spans(ours)}
    above.legend(
        handles=[
            Patch(color=colour[one], alpha=0.4, label=f"PAT in {one}") for one in sorted(used)
        ],
        loc="lower left",
        fontsize=8,
    )

    for number, (_, one) in enumerate(sides):
        mean = sum(one.seconds) / len(one.seconds)
        shade = _OURS if one is advice.ours else _STATIC if one is advice.sides.static else _OTHER
        below.barh(number, mean, color=shade, height=0.6)
        below.plot(one.seconds, [number] * len(one.seconds), "|", color="#c03d3e", markersize=12)
        below.text(max(one.seconds), number, f"  {mean:.1f} s", va="center", fontsize=8)
    below.set_yticks(range(len(sides)), [label for label, _ in sides], fontsize=8)
    below.invert_yaxis()
    below.set_xlim(0, max(max(one.seconds) for _, one in sides) * 1.12)
    below.set_xlabel(f"seconds of an iteration, {kind}; red: single iterations")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)

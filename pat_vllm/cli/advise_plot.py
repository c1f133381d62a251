"""The picture of `pat-vllm advise`."""

from __future__ import annotations

from pathlib import Path

from pat_vllm.advice.advice_text import heading, verdict
from pat_vllm.advice.verdict import Advice
from pat_vllm.reporting import Run
from pat_vllm.reporting.report_plot import (
    SWITCH_COLOUR,
    draw_live,
    layout_bands,
    layout_colours,
    new_figure,
    scale_live,
)

_STATIC, _OTHER, _SINGLE = "#7f7f7f", "#b8b8b8", "#c03d3e"


def plot_advice(advice: Advice, path: Path) -> None:
    """Save a PNG: the last iteration under PAT and in the best static layout above, the time of an
    iteration in every configuration below."""
    kind = "modelled" if advice.modelled else "simulated"
    shown = advice.shown
    last = (advice.results[choice][-1] for choice in (advice.ours, advice.static))
    ours, static = (Run(report, report.began, report.seconds) for report in last)
    figure, (above, below) = new_figure([4.7, 0.3 * len(shown) + 0.5], same_time=False)
    figure.suptitle(f"{heading(advice)}\n{verdict(advice)}", fontsize=9, wrap=True)

    colour = layout_colours(advice.rollouts.profile.layouts)
    used = {layout for layout, _, _ in ours.spans}
    bands = layout_bands(above, ours.spans, {layout: colour[layout] for layout in sorted(used)})
    for label, run, shade in (("best static", static, _STATIC), ("PAT", ours, SWITCH_COLOUR)):
        draw_live(above, run.live, color=shade, label=f"{label}: {run.seconds:.1f} s ({kind})")
    scale_live(above, len(advice.rollouts.batches[-1]))
    above.set_xlabel("time since the last iteration's requests were submitted (s)")
    above.add_artist(above.legend(loc="upper right", fontsize=8))
    above.legend(handles=bands, title="PAT", loc="lower left", fontsize=8)

    all_seconds = [advice.seconds(config) for config in shown]
    for number, (config, seconds) in enumerate(zip(shown, all_seconds, strict=True)):
        mean = sum(seconds) / len(seconds)
        plain = _STATIC if config == advice.static else _OTHER
        shade = SWITCH_COLOUR if config == advice.ours else plain
        below.barh(number, mean, color=shade, height=0.6)
        below.plot(seconds, [number] * len(seconds), "|", color=_SINGLE, markersize=12)
        below.text(max(seconds), number, f"  {mean:.1f} s", va="center", fontsize=8)
    below.set_yticks(range(len(shown)), list(map(str, shown)), fontsize=8)
    below.invert_yaxis()
    below.set_xlim(0, max(map(max, all_seconds)) * 1.12)
    below.set_xlabel(f"seconds of an iteration, {kind}; red: single iterations")
    figure.savefig(path, dpi=130)

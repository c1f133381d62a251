"""The settings of arXiv 2605.23945 on modelled profiles, and one workload under every policy."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.paper.compare import (
    OURS,
    PaperComparison,
    compare_with_paper,
    several_label,
)
from benchmarks.paper.policy import (
    BATCH,
    GENERATION_SHARE,
    SETTINGS,
    SWITCH_SECONDS,
    PaperSetting,
)
from benchmarks.paper.show import make_batches, rounded, show, title_of
from pat_vllm.cli.results import table, to_json
from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator import traces
from pat_vllm.simulator.modelled.hardware import modelled_profile

BASELINE_TP = 2
"""The paper's predictor errors are for TP2DP4 and TP8DP1, so that these seem to be its layouts."""

_HEADERS = (
    "setting",
    "static, s",
    "paper's policy",
    "pat-vllm, several expensive",
    "pat-vllm, several cheap",
    "regret",
    "pat-vllm vs static tp2",
    "published",
    "end to end vs tp2",
    "published e2e",
)


SAMPLE = 20_000
"""Lengths from which the paper's policy knows the distribution."""
_SAMPLE_SEED = 1_000_003
"""Added to the seed of the batches, so that the sample is not theirs."""


def simulate_settings(
    console: Console,
    *,
    seeds: int,
    seed: int,
    requests: int = BATCH,
    settings: Sequence[PaperSetting] = SETTINGS,
    output_dir: Path | None,
) -> list[tuple[PaperSetting, PaperComparison]]:
    """Replay the paper's settings on modelled profiles, and print and write the results.

    Args:
        seeds: batches with different lengths per setting, after one from which policies learn.
        requests: of a batch.
    """
    results = []
    with console.status("simulating") as status:
        for setting in settings:
            if not console.is_terminal:
                console.print(f"simulating {setting.title}")

            def progress(text: str, setting: PaperSetting = setting) -> None:
                status.update(f"simulating {setting.title}: {text}")

            profile = modelled_profile(setting.model, setting.gpu, setting.ranks)
            batches = [
                traces.deepscaler(requests, setting.max_tokens, seed + i) for i in range(seeds)
            ]
            comparison = compare_with_paper(
                profile,
                batches,
                title=setting.title,
                alone=modelled_profile(setting.model, setting.gpu, setting.ranks, static=True),
                lengths=traces.deepscaler(SAMPLE, setting.max_tokens, seed + _SAMPLE_SEED).lengths,
                paper_home=_baseline(profile),
                warm_up=[traces.deepscaler(requests, setting.max_tokens, seed + seeds)],
                progress=progress,
            )
            results.append((setting, comparison))
    shown = Table(title=_HEADING, title_justify="left")
    for header in _HEADERS:
        shown.add_column(header)
    for setting, comparison in results:
        shown.add_row(*_cells(setting, comparison))
    console.print(shown)
    console.print(NOTES)
    if output_dir is not None:
        from benchmarks.paper.batch_plot import plot_comparison
        from benchmarks.paper.plot import plot_paper

        output_dir.mkdir(parents=True, exist_ok=True)
        content = [
            {"setting": asdict(setting), **comparison.to_json(timelines=False)}
            for setting, comparison in results
        ]
        written = {"notes": NOTES, "settings": content}
        (output_dir / "paper.json").write_text(to_json(written))
        (output_dir / "paper.md").write_text(_markdown(results))
        plot_paper(results, output_dir / "paper.png")
        for setting, comparison in results:
            name = setting.title.lower().replace(",", "").replace(" ", "-")
            plot_comparison(comparison, output_dir / f"paper-{name}.png")
        console.print(f"written: {output_dir}/paper.json, paper.md, paper*.png")
    return results


def simulate_modelled(
    console: Console,
    *,
    gpu: str,
    model: str,
    ranks: int,
    profile: Path | None,
    lengths: Path | None,
    workload: str,
    iterations: int,
    requests: int,
    max_tokens: int,
    switch_cost: float,
    seed: int,
    output_dir: Path | None,
) -> PaperComparison:
    """Compare all policies on one workload, and print and write the result.

    Args:
        profile: file of a profile, in place of modelled hardware.
        switch_cost: seconds of a switch that counts as expensive.

    Raises:
        OSError: a file cannot be read.
        ValueError: an option names something that is not there.
    """
    engine = Profile.load(profile) if profile else modelled_profile(model, gpu, ranks)
    batches = make_batches(lengths, workload, iterations, requests, max_tokens, seed)
    if lengths is not None:
        known = batches[0].lengths
    else:
        known = traces.generator(workload)(SAMPLE, max_tokens, seed + _SAMPLE_SEED).lengths
    with console.status("simulating") as status:
        result = compare_with_paper(
            engine,
            batches,
            title=title_of(engine, batches),
            alone=None if profile else modelled_profile(model, gpu, ranks, static=True),
            lengths=known,
            expensive=switch_cost,
            progress=lambda text: status.update(f"simulating {text}"),
        )
    regret = ("regret", lambda one: f"{rounded(result.regret(one)):+.1%}")
    show(console, result, output_dir, extra=(regret,))
    return result


_HEADING = (
    "The settings of arXiv 2605.23945 on MODELLED profiles, nothing measured. Time of a batch "
    "relative to the best static layout: median (range) over batches"
)

NOTES = f"""\
- Published figures are from public summaries of the paper. It does not say which static layout is
  its baseline; its predictor errors are for TP2DP4 and TP8DP1, so tp{BASELINE_TP} is taken.
- The paper's policy begins there and switches at most once, at {SWITCH_SECONDS} s. It is given the
  true distribution of lengths and the true step times, more than its offline profile can know.
- pat-vllm learns lengths as it goes, one batch before those reported included, and begins in its
  base layout. "several expensive" pays {SWITCH_SECONDS} s for each switch.
- Every policy pays for the way back to the layout in which its next batch begins.
- Regret is against a clairvoyant: the same planner, told all lengths and the true times, or what
  did better under the same truth.
- Steps are those of the modelled profile, with noise bootstrapped from a measured one
  (pat_vllm/simulator/modelled/measured.json).
- End to end is derived: generation is {GENERATION_SHARE:.3f} of an iteration by the paper's own
  two figures (generation -34.6%, iteration -27.2%)."""


def _baseline(profile: Profile) -> Layout:
    """The baseline's layout, or the next larger that the profile has."""
    return next(one for one in profile.layouts if one.tp >= BASELINE_TP)


def _cells(setting: PaperSetting, result: PaperComparison) -> tuple[str, ...]:
    best = result.best_static
    first = result.others[0].label  # its label depends on where it begins
    low = next(row for layout, row in result.static.items() if layout.tp >= BASELINE_TP)
    saving = result.saving(OURS, low)
    static = ", ".join(
        f"{layout}: {statistics.median(run.seconds for run in row.runs):.0f}"
        + ("*" if row is best else "")
        for layout, row in result.static.items()
    )
    return (
        setting.title,
        static,
        *(_change(result.saving(label)) for label in (first, several_label(SWITCH_SECONDS), OURS)),
        f"{rounded(result.regret(result.result(OURS))):+.1%}",
        _change(saving),
        "" if setting.generation is None else f"{setting.generation:+.1%}",
        f"{1 / (1 - GENERATION_SHARE * saving[0]):.2f}x",
        "" if setting.speedup is None else f"{setting.speedup:.2f}x",
    )


def _change(saving: tuple[float, float, float]) -> str:
    median, least, most = (rounded(-part) for part in saving)
    return f"{median:+.1%} ({most:+.1%} to {least:+.1%})"


def _markdown(results: Sequence[tuple[PaperSetting, PaperComparison]]) -> str:
    parts = [
        f"{_HEADING}\n\n",
        table(_HEADERS, [_cells(*result) for result in results]),
        f"\n`*`: the best static layout.\n\n{NOTES}\n",
    ]
    for setting, comparison in results:
        headers = ("policy", *(f"vs {layout}" for layout in comparison.static), "regret")
        rows = [
            (
                row.label,
                *(_change(comparison.saving(row.label, one)) for one in comparison.static.values()),
                f"{rounded(comparison.regret(row)):+.1%}",
            )
            for row in comparison.results
        ]
        parts.append(f"\n### {setting.title}\n\n{table(headers, rows)}")
    return "".join(parts)

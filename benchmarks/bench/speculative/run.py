"""The part of `python -m benchmarks.bench` that serves workloads with speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bench.run import BenchSettings, command_of, progress_of
from benchmarks.bench.speculative.measure import measure, rounds
from benchmarks.bench.speculative.models import model as make_model
from benchmarks.bench.speculative.report import markdown, workload_content
from benchmarks.bench.speculative.workloads import SpeculativeWorkload
from benchmarks.record import machine, results_dir
from pat_vllm.cli.demo import model_config
from pat_vllm.cli.results import to_json


def bench_speculative(
    console: Console,
    *,
    workloads: tuple[SpeculativeWorkload, ...],
    models_dir: Path,
    ranks: int,
    repeats: int,
    scale: str,
    seed: int,
    output_dir: Path | None,
) -> Path:
    """Measure, print, and write JSON and Markdown.

    Returns:
        The JSON file.

    Raises:
        EngineFailed: an engine failed.
        ValueError: an option does not fit, or drafts are not accepted as a workload says.
    """
    names = dict.fromkeys(name for workload in workloads for name in workload.models)
    with console.status("making random models"):
        models = {name: make_model(name, models_dir) for name in names}
    first = models[next(iter(names))]
    settings = BenchSettings(first, ranks, workloads, repeats, scale, seed)
    facts = machine(command_of(settings, own_model=True), Path(__file__).parent)
    config = model_config(first)
    directory = results_dir(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / f"{facts['date'][:10]}-bench-speculation"
    path = Path(f"{stem}.json")
    content: dict[str, Any] = {
        "machine": facts,
        "settings": {
            "ranks": ranks,
            "repeats": repeats,
            "scale": scale,
            "seed": seed,
            "layouts": [str(layout) for layout in settings.layouts],
        },
        "workloads": [],
    }
    found = []
    with progress_of(console, sum(rounds(settings, one) for one in workloads)) as progress:
        for workload in workloads:
            own = replace(settings, model=models[workload.models[0]], workloads=(workload,))
            found.append(measure(own, workload, models, config, progress))
            # At once, so that a later failure leaves what was measured.
            content["workloads"].append(workload_content(own, found[-1]))
            path.write_text(to_json(content))
            Path(f"{stem}.md").write_text(markdown(content))
    console.print(markdown(content), soft_wrap=True, markup=False)
    console.print(f"written: {stem}.json, .md", soft_wrap=True)
    for one in found:
        one.check_accepted()
    return path

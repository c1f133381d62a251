"""`python -m benchmarks.bench`: real engines, static and adaptive, take turns on the same batches.

The sides are engines that stay alive, each in a process of its own; they differ in PAT's options
and in nothing else. A workload's first batch warms them up; the adaptive engine is a new one for
each workload, so that it has learnt lengths from this workload only, and from its first batch on.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psutil import virtual_memory
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks.bench.calibrated import CalibratedSimulator, calibrate_simulator
from benchmarks.bench.engines import BenchEngine, BenchSettings, engine_options, shared_profile
from benchmarks.bench.judgement import Judgement, judge
from benchmarks.bench.report import content_of, markdown
from benchmarks.bench.runs import PAT, Run
from benchmarks.bench.serve import requests_of, serve
from benchmarks.bench.workloads import Workload
from benchmarks.engine_process import EngineFailed
from benchmarks.record import machine, results_dir
from pat_vllm.cli.demo_batch import demo_model, model_config
from pat_vllm.files.writing import to_json
from pat_vllm.gpus import gib
from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.truth import ReplayedTruth

_ADAPTIVE_MEMORY = 1.5
"""Memory of an engine with two layouts, at most, relative to one with the larger of them."""


def sides(settings: BenchSettings) -> dict[str, dict[str, Any]]:
    """`additional_config["pat"]` of each side: every static layout, and the default policy.

    A static engine keeps only its own layout, so that all engines fit into the memory at once.
    """
    static: dict[str, dict[str, Any]] = {
        str(layout): {
            "policy": {"kind": "static", "tp": layout.tp},
            "layouts": [layout.tp],
            "base_tp": layout.tp,
        }
        for layout in settings.layouts
    }
    return {**static, PAT: {"policy": {"kind": "predictor", "length_bound": settings.max_tokens}}}


@dataclass(frozen=True)
class Measurements:
    """All runs, the profile that the adaptive engine decided by, and seconds of its starts: the
    first with the profile taken, the others with it at hand."""

    runs: tuple[Run, ...]
    profile: Profile
    start_seconds: Mapping[str, tuple[float, ...]]


def measure(
    settings: BenchSettings, config: Mapping[str, Any], progress: Callable[[str], None]
) -> Measurements:
    """Serve all batches on all sides, in turns.

    Args:
        progress: is told what is done next, before each start and each batch.

    Raises:
        EngineFailed: an engine failed; none is left running.
        ValueError: the model does not fit the workloads.
    """
    runs: list[Run] = []
    scratch = Path(tempfile.mkdtemp(prefix="pat-vllm-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        all_sides: list[BenchEngine] = []
        taken = 0
        for name, pat in sides(settings).items():
            options = engine_options(settings, pat, config)
            side = BenchEngine(name, options, settings.ranks, scratch)
            stack.callback(side.close)
            all_sides.append(side)
            if name != PAT:
                progress(f"starting {name}")
                before = virtual_memory().available
                side.start()
                taken = max(taken, before - virtual_memory().available)
        # With two layouts it takes more than with one; what runs out of memory takes others along.
        if (left := virtual_memory().available) < _ADAPTIVE_MEMORY * taken:
            raise EngineFailed(
                f"a static engine took {gib(taken)} and {gib(left)} are left, which is too little "
                "for the adaptive one besides; free some memory or use a smaller --model"
            )
        for workload in settings.workloads:
            progress(f"{workload.name}: starting {PAT}")
            all_sides[-1].start()
            profile = shared_profile(scratch)
            for repeat in range(settings.repeats + 1):
                trace = settings.trace(workload, repeat)
                requests = requests_of(trace, config["vocab_size"], settings.seed + repeat)
                first = repeat % len(all_sides)
                for side in (*all_sides[first:], *all_sides[:first]):
                    progress(f"{workload.name}, batch {repeat} of {settings.repeats}: {side.name}")
                    name = f"{trace.name}-{repeat}"
                    run, _ = side.run(side.name, trace, repeat, serve, requests, name)
                    runs.append(run)
    starts = {side.name: tuple(side.start_seconds) for side in all_sides}
    return Measurements(tuple(runs), profile, starts)


def rounds(settings: BenchSettings) -> int:
    """How often `measure` tells its progress."""
    batches = (settings.repeats + 1) * len(sides(settings))
    return len(settings.layouts) + len(settings.workloads) * (1 + batches)


# -------------------------------------------------------------------- the command


def bench(
    console: Console,
    *,
    model: Path | None,
    models_dir: Path,
    ranks: int,
    repeats: int,
    workloads: tuple[Workload, ...],
    scale: str,
    seed: int,
    output_dir: Path | None,
    picture: Path | None,
) -> Path:
    """Measure, judge, print, and write JSON, Markdown and PNG.

    Returns:
        The JSON file.

    Raises:
        EngineFailed: an engine failed.
        ValueError: an option does not fit.
    """
    from benchmarks.bench.plot import plot_bench

    own = model is None
    if model is None:
        with console.status("making a random model"):
            model = demo_model(models_dir)
    settings = BenchSettings(model.resolve(), ranks, workloads, repeats, scale, seed)
    facts = machine(command_of(settings, own), Path(__file__).parent)
    config = model_config(model)
    with progress_of(console, rounds(settings)) as progress:
        measured = measure(settings, config, progress)
    layouts = settings.layouts
    judged = {}
    with console.status("judging by the clairvoyant") as status:
        for workload in workloads:
            status.update(f"judging {workload.name} by the clairvoyant")
            judged[workload.name] = judge_workload(settings, workload, measured, layouts)
    content = content_of(settings, facts, config, measured, judged)

    directory = results_dir(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / f"{facts['date'][:10]}-bench"
    path = Path(f"{stem}.json")
    path.write_text(to_json(content))
    text = markdown(content)
    Path(f"{stem}.md").write_text(text)
    plot_bench(content, Path(f"{stem}.png"))
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(f"{stem}.png", picture)
    console.print(text, soft_wrap=True, markup=False)
    console.print(f"written: {stem}.json, .md, .png", soft_wrap=True)
    return path


def judge_workload(
    settings: BenchSettings, workload: Workload, measured: Measurements, layouts: Sequence[Layout]
) -> tuple[CalibratedSimulator, list[Judgement]]:
    """The simulator, calibrated with this workload's static runs, and judgements of PAT's."""
    by_side: defaultdict[str, list[Run]] = defaultdict(list)
    for run in measured.runs:
        if run.workload == workload.name and run.repeat:
            by_side[run.side].append(run)
    traces = [settings.trace(workload, run.repeat) for run in by_side[PAT]]
    simulator = calibrate_simulator(
        ReplayedTruth(measured.profile),
        measured.profile,
        traces,
        {layout: [run.seconds for run in by_side[str(layout)]] for layout in layouts},
        [switch for run in by_side[PAT] for switch in run.switches],
    )
    pairs = zip(traces, by_side[PAT], strict=True)
    return simulator, [judge(trace, run, simulator) for trace, run in pairs]


@contextlib.contextmanager
def progress_of(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Shows progress: what it gives is told what comes next, `total` times."""
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=-1)

        def tell(text: str) -> None:
            progress.update(task, description=text, advance=1)
            if not console.is_terminal:
                console.print(text)

        yield tell


def command_of(settings: BenchSettings, own_model: bool) -> str:
    """The command line, without the places of this machine."""
    named = [one.name for one in settings.workloads if one.option is None]
    given = {
        "--model": None if own_model else settings.model.name,
        "--ranks": settings.ranks,
        "--repeats": settings.repeats,
        "--workloads": ",".join(named) or None,
        "--scale": settings.scale,
        "--seed": settings.seed,
    }
    words = [f"{name} {value}" for name, value in given.items() if value is not None]
    words += [one.option for one in settings.workloads if one.option is not None]
    return " ".join(["python -m benchmarks.bench", *words])

"""The part of `python -m benchmarks.bench` that serves workloads with speculation.

Of each it tunes the tables first, then serves the batches on all sides.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.batch import Request
from benchmarks.bench.engines import BenchEngine, BenchSettings, shared_profile
from benchmarks.bench.run import command_of, progress_of
from benchmarks.bench.runs import PAT
from benchmarks.bench.speculative.engines import (
    PAT_PLAIN,
    Side,
    SpeculativeRun,
    Table,
    load_weights,
    options_of,
    run_batch,
    sides_of,
)
from benchmarks.bench.speculative.models import model as random_model
from benchmarks.bench.speculative.report import markdown, workload_content
from benchmarks.bench.speculative.tuning import (
    Drafted,
    accepted_share,
    together,
    tuned_table,
)
from benchmarks.bench.speculative.workloads import (
    ACCEPTED,
    DRAFT_LENGTHS,
    SpeculativeWorkload,
    phrase_of,
    requests_with_phrase,
)
from benchmarks.paired import shuffled
from benchmarks.record import machine, results_dir
from pat_vllm.cli.demo_batch import model_config
from pat_vllm.files.writing import to_json
from pat_vllm.layout import Layout
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.traces import LengthTrace

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Measured:
    """A workload's batches, and what its engines were given.

    Attributes:
        gave: by model, what each fixed draft length gave in the batches that tables are tuned by.
        tables: by layout.
    """

    workload: SpeculativeWorkload
    runs: tuple[SpeculativeRun, ...]
    gave: Mapping[str, tuple[Drafted, ...]]
    tables: Mapping[Layout, Table]

    def static(self, model: str) -> list[Drafted]:
        """What all drafts of a model gave in the counted batches of the static sides."""
        return [
            run.gave
            for run in self.runs
            if run.run.repeat and run.model == model and run.run.side not in (PAT, PAT_PLAIN)
        ]

    def check_accepted(self) -> None:
        """Raise ValueError unless as many drafts were accepted as the workload says."""
        for model in {one.model for one in self.runs if one.run.repeat}:
            least, most = ACCEPTED[model]
            gave = self.static(model)
            share = accepted_share(gave)
            if not least <= share <= most:
                raise ValueError(
                    f"{self.workload.name}: with the model {model!r} {share:.3f} of the draft "
                    f"tokens were accepted; the workload is one where {least:g} to {most:g} are"
                )


def rounds(settings: BenchSettings, workload: SpeculativeWorkload) -> int:
    """How often `measure` tells its progress."""
    sides = sides_of(settings.layouts)
    engines = 1 + len({side.engine for side in sides})
    tuning = len(dict.fromkeys(workload.models)) * (len(DRAFT_LENGTHS) - 1)
    return engines + tuning + (settings.repeats + 1) * len(sides)


def measure(
    settings: BenchSettings,
    workload: SpeculativeWorkload,
    models: Mapping[str, Path],
    config: Mapping[str, Any],
    progress: Progress,
) -> Measured:
    """Serve all batches on all sides, in turns, each repeat in another order.

    Args:
        settings: of which `model` is the workload's first.
        models: checkpoints by name.
        config: of these models, which have the same.
        progress: is told what is done next.

    Raises:
        EngineFailed: an engine failed; none is left running.
    """
    scratch = Path(tempfile.mkdtemp(prefix="pat-vllm-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)

        def start(name: str, options: dict[str, Any]) -> BenchEngine:
            progress(f"{workload.name}: starting {name}")
            engine = BenchEngine(name, options, settings.ranks, scratch, pauses=True)
            stack.callback(engine.close)
            engine.start()
            return engine

        tuner = start("profiling", options_of(settings, workload, config, {})[PAT])
        gave = _try_lengths(tuner, settings, workload, models, config, progress)
        tuner.close()
        profile = shared_profile(scratch)
        tables = _tables(settings, workload, profile, gave)

        engines = {}
        for name, options in options_of(settings, workload, config, tables).items():
            engines[name] = start(name, options)
        runs: list[SpeculativeRun] = []
        model = workload.model(0)
        for repeat in range(settings.repeats + 1):
            if workload.model(repeat) != model:
                model = workload.model(repeat)
                for engine in engines.values():
                    engine.call(load_weights, str(models[model]))
            for side in shuffled(sides_of(settings.layouts), seed=settings.seed + repeat):
                progress(f"{workload.name}, batch {repeat} of {settings.repeats}: {side.name}")
                batch = _batch(settings, workload, config, repeat, model)
                runs.append(run_batch(engines[side.engine], side, *batch, repeat, model))
        shared_profile(scratch)
    return Measured(workload, tuple(runs), gave, tables)


def _batch(
    settings: BenchSettings,
    workload: SpeculativeWorkload,
    config: Mapping[str, Any],
    repeat: int,
    model: str,
) -> tuple[LengthTrace, tuple[Request, ...]]:
    trace = settings.trace(workload, repeat)
    seed = settings.seed + repeat
    return trace, requests_with_phrase(trace, config["vocab_size"], seed, phrase_of(model))


def _try_lengths(
    engine: BenchEngine,
    settings: BenchSettings,
    workload: SpeculativeWorkload,
    models: Mapping[str, Path],
    config: Mapping[str, Any],
    progress: Progress,
) -> dict[str, tuple[Drafted, ...]]:
    """What each fixed draft length gives with each model, on the batch that is not counted."""
    found: dict[str, tuple[Drafted, ...]] = {}
    for model in dict.fromkeys(workload.models):
        if found:
            engine.call(load_weights, str(models[model]))
        batch = _batch(settings, workload, config, 0, model)
        gave = []
        for length in DRAFT_LENGTHS[1:]:
            progress(f"{workload.name}: {length} drafts with the model {model}")
            side = Side(f"{model}, k = {length}", engine.name, length)
            tp = settings.layouts[0].tp
            gave.append(run_batch(engine, side, *batch, 0, model, tp).gave)
        found[model] = tuple(gave)
    return found


def _tables(
    settings: BenchSettings,
    workload: SpeculativeWorkload,
    profile: Profile,
    gave: Mapping[str, tuple[Drafted, ...]],
) -> dict[Layout, Table]:
    """By layout, the table that is best for all models of the workload together."""
    steps = StepTimeModel.fit(profile)
    of_all = together(one for some in gave.values() for one in some)
    plain = Drafted(0, sum(one.tokens for one in of_all.values()), 0, 0)
    # Late in a batch, where the table matters.
    context = workload.prompts[1] + settings.max_tokens / 2
    return {
        layout: tuned_table(
            steps,
            layout,
            profile.max_num_seqs[layout.tp],
            context,
            (plain, *of_all.values()),
        )
        for layout in settings.layouts
    }


# -------------------------------------------------------------------- the command


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
        models = {name: random_model(name, models_dir) for name in names}
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

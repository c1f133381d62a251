"""`pat-vllm profile`: measures an engine's steps and switches, for engines with the same flags.

The engine measures a few points at a time, and the profile is saved after each time. A run that was
stopped goes on where it was.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pat_vllm.cli.options import check_engine, failed, options_of
from pat_vllm.cli.ranges import EngineOptions, PATOptions, Ranged
from pat_vllm.executor.rpc import PROFILE_COMMAND
from pat_vllm.start.text_only import starting_with_safe_path, without_vision_and_audio

if TYPE_CHECKING:  # these are slow to import, for `--help`
    from vllm import LLM

    from pat_vllm.layout import Layout
    from pat_vllm.profile import Profile, StepSample, SwitchSample
    from pat_vllm.profiling.grid import Point

_SLICE = 4
"""Points that the engine measures between two saves: a few seconds."""
_AS_IN_VLLM = "As in vLLM."


@dataclass(frozen=True)
class ProfileOptions(Ranged):
    """The engine to measure, by vLLM's options and PAT's, and how."""

    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, max=1024, help="Ranks of the engine.")
    ] = 2
    dtype: Annotated[str, typer.Option(help=_AS_IN_VLLM)] = "auto"
    load_format: Annotated[
        str, typer.Option(help="As in vLLM; `dummy` needs no more of a checkpoint than its config.")
    ] = "auto"
    max_model_len: Annotated[int | None, typer.Option(min=-1, max=1 << 31, help=_AS_IN_VLLM)] = None
    max_num_seqs: Annotated[int | None, typer.Option(min=1, max=1 << 31, help=_AS_IN_VLLM)] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, max=1 << 31, help=_AS_IN_VLLM)
    ] = None
    enforce_eager: Annotated[bool, typer.Option(help=_AS_IN_VLLM)] = False
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(min=1, max=1 << 62, help=_AS_IN_VLLM)
    ] = None
    block_size: Annotated[int | None, typer.Option(min=1, max=1 << 20, help=_AS_IN_VLLM)] = None
    speculative_config: Annotated[
        dict[str, Any],
        typer.Option(
            metavar="JSON",
            help="As in vLLM, an object; measures steps with drafts, too.",
        ),
    ] = field(default_factory=dict)
    pat: PATOptions = field(default_factory=dict)
    engine: EngineOptions = field(default_factory=dict)
    output: Annotated[
        Path | None, typer.Option(help="JSON to write; named after the engine by default.")
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure only what an engine's start would measure.")
    ] = False
    budget: Annotated[
        float | None,
        typer.Option(min=1, max=1_000_000, help="Seconds after which the rest is left out."),
    ] = None


@options_of(ProfileOptions)
def take_engine_profile(
    options: ProfileOptions,
    model: Annotated[str, typer.Argument(help="Checkpoint, as vLLM takes it.")],
) -> None:
    """Measure an engine's steps and switches; run it again to go on after an interruption.

    The profile holds for engines with the same flags in the same environment, named in
    pat.policy.profile.
    """
    from pat_vllm.profile import ProfileError

    without_vision_and_audio()
    try:
        take_profile(Console(highlight=False), engine_arguments(model, options), options)
    except ProfileError as error:
        raise failed(error) from error
    except RuntimeError as error:
        raise failed(f"the engine failed: {error}") from error


def engine_arguments(model: str, options: ProfileOptions) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; the policy does not matter."""
    check_engine(options.engine, options.pat, options.tensor_parallel_size)
    pat = {**options.pat, "policy": {"kind": "static"}}
    ours = ("pat", "engine", "output", "quick", "budget")
    given = {k: v for k, v in vars(options).items() if k not in ours and v is not None and v != {}}
    return {
        "model": model,
        "distributed_executor_backend": "pat",
        # Requests are made of token ids.
        "skip_tokenizer_init": True,
        **given,
        **options.engine,
        "additional_config": {**options.engine.get("additional_config", {}), "pat": pat},
    }


def take_profile(console: Console, engine: Mapping[str, Any], options: ProfileOptions) -> None:
    """Start an engine, measure it, write the profile, and print what it says.

    A file that an earlier run has left for this engine is completed.

    Args:
        engine: keyword arguments of `vllm.LLM`.

    Raises:
        ProfileError: the file that is there is no profile of this engine.
    """
    from pat_vllm.profile import Profile, StepSample, SwitchSample
    from pat_vllm.profiling.grid import FULL_SECONDS, POINTS, QUICK_OVERTIME, QUICK_SECONDS
    from pat_vllm.profiling.quality import problems

    quick = options.quick
    budget = options.budget or (QUICK_SECONDS + QUICK_OVERTIME if quick else FULL_SECONDS)
    with _engine(console, engine) as llm:
        (described,) = llm.collective_rpc(PROFILE_COMMAND, kwargs={"quick": quick})
        header, essential = described["header"], described["essential"]
        path = options.output or Path(default_name(header))
        points = POINTS.validate_python(described["points"])
        steps, switches = measured_before(path, header["key"])
        console.print(header["title"], soft_wrap=True)
        if steps:
            console.print(f"going on with {path}; delete it to measure all anew", soft_wrap=True)
        waiting = unmeasured(points, steps, switches)
        # A profile has steps of every layout.
        part = max(_SLICE, len({*points[:essential]} & {*waiting}))
        started = time.monotonic()
        with _progress(console) as progress:
            task = progress.add_task("", total=len(points), completed=len(points) - len(waiting))
            while waiting:
                now, waiting = waiting[:part], waiting[part:]
                progress.update(task, description=str(now[0]))
                (answer,) = llm.collective_rpc(
                    PROFILE_COMMAND, args=(POINTS.dump_python(now), quick)
                )
                steps += [StepSample(**values) for values in answer["steps"]]
                switches += [SwitchSample(**values) for values in answer["switches"]]
                note = f"; {len(waiting)} of {len(points)} points left out" if waiting else ""
                Profile(
                    **header,
                    created=datetime.now(UTC).isoformat(timespec="seconds"),
                    steps=tuple(steps),
                    switches=tuple(switches),
                    note=f"pat-vllm profile{note}",
                ).save(path)
                progress.advance(task, len(now))
                part = _SLICE
                if time.monotonic() - started > budget:
                    break
            progress.update(task, description="")
    profile = Profile.load(path)
    show(console, profile)
    for problem in problems(profile.steps, len(waiting), len(points)):
        console.print(
            f"\nThis profile may mislead PAT: {problem}. Let nothing else run on the engine's "
            f"devices and cores, and run this command again with --output {path} and perhaps a "
            "longer --budget: it measures what is missing, and anew what was noisy.",
            soft_wrap=True,
        )
    console.print(f"\nprofile: {path}", soft_wrap=True)


def measured_before(
    path: Path, key: Mapping[str, Any]
) -> tuple[list[StepSample], list[SwitchSample]]:
    """Samples of the file that an earlier run has left, but for steps whose repeats differ much.

    Raises:
        ProfileError: it is no profile, or one of another engine.
        ValueError: no file can have this name.
    """
    from pat_vllm.files.reading import check_name
    from pat_vllm.profile import Profile, ProfileError
    from pat_vllm.profiling.quality import unsettled

    check_name(str(path))
    if not path.exists():
        return [], []
    try:
        profile = Profile.load(path)
        profile.check(key, path)
    except ProfileError as error:
        raise ProfileError(f"{error}. Or delete the file, or choose another --output") from None
    return [step for step in profile.steps if not unsettled(step)], [*profile.switches]


def unmeasured(
    points: Iterable[Point], steps: Iterable[StepSample], switches: Iterable[SwitchSample]
) -> list[Point]:
    """Those of the points that no sample is of."""
    from pat_vllm.profiling.grid import StepPoint

    def is_measured(point: Point) -> bool:
        if isinstance(point, StepPoint):
            return any(map(point.measured_by, steps))
        return any(map(point.measured_by, switches))

    return [point for point in points if not is_measured(point)]


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
    )


@contextmanager
def _engine(console: Console, engine: Mapping[str, Any]) -> Iterator[LLM]:
    # Nothing that decides the ranks' speed is set here: the profile is for engines that are
    # started from the same environment.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    with console.status("starting the engine"), starting_with_safe_path():
        llm = LLM(**engine)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def default_name(header: Mapping[str, Any]) -> str:
    model = header["key"]["model"]
    parts = (
        str(model["architecture"]).removesuffix("ForCausalLM"),
        f"{model.get('num_hidden_layers')}x{model.get('hidden_size')}",
        f"{header['ranks']}x{header['key']['hardware']}",
        datetime.now().strftime("%Y-%m-%d"),
    )
    return re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(parts)).strip("-") + ".json"


def show(console: Console, profile: Profile) -> None:
    """Print a table of what was measured, and how well a model of it does on points held out."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("layout", no_wrap=True)
    for heading in ("samples", "batch", "context", "ms at 1", "ms at most", "switch ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layout in profile.layouts:
        table.add_row(str(layout), *_cells(profile, layout))
    console.print(table)
    console.print(
        "layout: tensor parallel size (tp) and replicas (dp), all busy; batch: of one replica."
    )
    for layout in profile.layouts:
        if by_drafts := _by_drafts(profile, layout):
            console.print(f"{layout}: {by_drafts}")
    try:
        from pat_vllm.predictor.step_time import StepTimeModel

        fits = StepTimeModel.fit(profile).fits
    except ImportError as error:
        console.print(f"The error on held-out points is not shown: {error}")
        return
    for layout, fit in fits.items():
        if errors := sorted(fit.with_residual if fit.learned else fit.roofline):
            means = [
                statistics.mean(values) for values in (errors, fit.roofline, fit.with_residual)
            ]
            console.print(
                f"{layout}: {len(errors)} held-out steps are predicted within {means[0]:.1%} on "
                f"average, nine in ten within {errors[int(0.9 * (len(errors) - 1))]:.1%}, by the "
                f"roofline {'with' if fit.learned else 'without'} its residual (without "
                f"{means[1]:.1%}, with {means[2]:.1%})"
            )


def _cells(profile: Profile, layout: Layout) -> list[str]:
    """Samples, batches, contexts, ms of a step at batch 1 and at the largest, of an empty switch"""
    every = [s for s in profile.steps if s.layout == layout]
    decodes = [s for s in every if s.batch and not s.prefill and not s.k]
    busy = [s for s in decodes if s.busy == layout.replicas] or decodes
    batches, contexts = ([s.batch for s in decodes], [s.context // s.batch for s in decodes])
    empty = [s.seconds for s in profile.switches if s.source == layout and not s.num_seqs]
    return [
        str(len(every)),
        f"{min(batches)}-{max(batches)}",
        f"{min(contexts)}-{max(contexts)}",
        f"{1e3 * _shortest(busy, 1):.1f}",
        f"{1e3 * _shortest(busy, max(batches)):.1f}",
        f"{1e3 * statistics.median(empty):.1f}" if empty else "-",
    ]


def _by_drafts(profile: Profile, layout: Layout) -> str:
    """What a step takes by its drafts, at the largest batch that was measured with all of them."""
    by_k: dict[int, dict[int, list[StepSample]]] = {}
    for s in profile.steps:
        decodes = s.layout == layout and s.busy == layout.replicas and s.batch and not s.prefill
        if decodes and s.drafts == s.k * s.batch:
            by_k.setdefault(s.k, {}).setdefault(s.batch, []).append(s)
    common = set.intersection(*map(set, by_k.values())) if len(by_k) > 1 else set()
    if not common:
        return ""
    most = max(common)
    cells = [f"{k}: {1e3 * _shortest(by_k[k][most], most):.1f}" for k in sorted(by_k)]
    return f"ms of a step at batch {most}, by drafts of a request: {', '.join(cells)}"


def _shortest(samples: Iterable[StepSample], batch: int) -> float:
    """Seconds of a step with this batch (or the nearest) and the shortest contexts."""
    return min(samples, key=lambda s: (abs(s.batch - batch), s.context)).seconds

"""`pat-vllm profile`: measures an engine's steps and switches, for engines with the same flags."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pat_vllm.cli.options import check_engine, failed, options_of
from pat_vllm.cli.ranges import EngineOptions, PATOptions, Ranged
from pat_vllm.executor.rpc import PROFILE_COMMAND
from pat_vllm.start.safe_path import starting_with_safe_path

if TYPE_CHECKING:  # these are slow to import, for `--help`
    from vllm import LLM

    from pat_vllm.layout import Layout
    from pat_vllm.profile import Profile, StepSample

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
    budget: Annotated[
        float,
        typer.Option(min=1, max=1_000_000, help="Seconds after which the rest is left out."),
    ] = 300.0


@options_of(ProfileOptions)
def take_engine_profile(
    options: ProfileOptions,
    model: Annotated[str, typer.Argument(help="Checkpoint, as vLLM takes it.")],
) -> None:
    """Measure an engine's steps and switches, as at its start but with more time.

    The profile holds for engines with the same flags in the same environment, named in
    pat.policy.profile.
    """
    try:
        take_profile(Console(highlight=False), engine_arguments(model, options), options)
    except RuntimeError as error:
        raise failed(f"the engine failed: {error}") from error


def engine_arguments(model: str, options: ProfileOptions) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; the policy does not matter."""
    check_engine(options.engine, options.pat, options.tensor_parallel_size)
    pat = {**options.pat, "policy": {"kind": "static"}}
    ours = ("pat", "engine", "output", "budget")
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

    Args:
        engine: keyword arguments of `vllm.LLM`.
    """
    from pat_vllm.profile import Profile

    with _engine(console, engine) as llm, console.status("measuring"):
        (answer,) = llm.collective_rpc(PROFILE_COMMAND, kwargs={"seconds": options.budget})
    profile = Profile.model_validate(answer["profile"])
    path = options.output or Path(default_name(profile))
    profile.save(path)
    console.print(profile.title, soft_wrap=True)
    show(console, profile)
    for problem in answer["problems"]:
        console.print(
            f"\nThis profile may mislead PAT: {problem}. Let nothing else run on the engine's "
            "devices and cores, and run this command again, perhaps with a longer --budget.",
            soft_wrap=True,
        )
    console.print(f"\nprofile: {path}", soft_wrap=True)


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


def default_name(profile: Profile) -> str:
    """Names the model, the hardware and the day."""
    model = profile.key["model"]
    parts = (
        str(model["architecture"]).removesuffix("ForCausalLM"),
        f"{model.get('num_hidden_layers')}x{model.get('hidden_size')}",
        f"{profile.ranks}x{profile.key['hardware']}",
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
    try:
        from pat_vllm.predictor.steps.step_time import StepTimeModel

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


def _shortest(samples: Iterable[StepSample], batch: int) -> float:
    """Seconds of a step with this batch (or the nearest) and the shortest contexts."""
    return min(samples, key=lambda s: (abs(s.batch - batch), s.context)).seconds

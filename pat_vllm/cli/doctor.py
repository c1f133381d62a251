"""`pat-vllm doctor`: is this machine fit? Progress, the table, JSON and a picture."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pat_vllm.cli.doctor_models import self_test_models, sizes_of
from pat_vllm.cli.engine_run import environment
from pat_vllm.config import PATConfig
from pat_vllm.doctor.child import ending_by_signals
from pat_vllm.doctor.plan import Models, Plan
from pat_vllm.doctor.stages import run_stages
from pat_vllm.doctor.values import Stage, Verdict, names_of_this_machine, without_names
from pat_vllm.files.reading import read_text
from pat_vllm.files.writing import write_whole
from pat_vllm.gpus import GPUS, gpu_named

_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "dim"}


def doctor(
    console: Console,
    *,
    model: Path | None,
    gpu: str | None,
    ranks: int,
    pat: dict[str, Any],
    engine: dict[str, Any],
    shape: str,
    dtype: str | None,
    draft_length: int,
    all_stages: bool,
    figures: bool,
    output_dir: Path | None,
) -> bool:
    """Run the stages, print what they find, and write it.

    Args:
        draft_length: the longest of the self-test; 0 is no speculative decoding.

    Returns:
        Whether no stage failed.

    Raises:
        ValueError: an option is not allowed, or options do not fit each other.
    """
    PATConfig.parse(pat).check_layouts(ranks)
    if gpu is not None and model is None:
        raise ValueError("--gpu computes memory for a model: name one by --model")
    names = names_of_this_machine()
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(output_dir, os.W_OK):
            raise PermissionError(f"--output-dir {output_dir} may not be written to; name another")
    with ExitStack() as stack:
        stack.enter_context(ending_by_signals())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pat-vllm-doctor-")))
        folder = None if model is None else _checkpoint(model, scratch / "model")
        sizes = sizes_of(shape, folder, ranks)
        plan = Plan(
            ranks=ranks,
            pat=pat,
            engine=engine,
            model=folder,
            gpu=None if gpu is None else GPUS[gpu_named(gpu)].device,
            machine=gpu is None,
            dtype=dtype,
            all=all_stages,
            figures=figures,
            environment=_environment,
        )
        began = time.monotonic()
        stages: list[Stage] = []
        status = stack.enter_context(console.status("starting"))

        def doing(what: str) -> None:
            status.update(f"[{time.monotonic() - began:4.0f} s] {escape(what)}")
            if not console.is_terminal:
                console.print(f"[{time.monotonic() - began:4.0f} s] {what}", markup=False)

        def make_models() -> Models:
            return self_test_models(scratch, sizes, draft_length)

        for stage in run_stages(plan, make_models, doing):
            stages.append(_without_names(stage, names))
            _show_stage(console, stages[-1])
        status.stop()
        command = without_names(shlex.join(["pat-vllm", *sys.argv[1:]]), names)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        verdict = Verdict(date, command, tuple(stages))
    show(console, verdict)
    if output_dir is not None:
        from pat_vllm.cli.doctor_plot import plot

        write_whole(output_dir / "doctor.json", verdict.to_json() + "\n")
        plot(verdict, output_dir / "doctor.png")
        console.print(f"written: {output_dir}/doctor.json, doctor.png", soft_wrap=True)
    return verdict.failed is None


def _environment(ranks: int, may_compile: bool) -> dict[str, str]:
    """Nothing is downloaded, and an engine's core has a process of its own, as for users."""
    given = {"HF_HUB_OFFLINE": "1", **environment(ranks)}
    if may_compile and "TORCHDYNAMO_DISABLE" not in os.environ:
        del given["TORCHDYNAMO_DISABLE"]
    return {**given, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def _checkpoint(model: Path, folder: Path) -> Path:
    """The folder of a model that has at least its config.

    Raises:
        ValueError: there is no config.
    """
    if model.is_dir() and (model / "config.json").is_file():
        return model.resolve()
    if model.is_file():
        folder.mkdir()
        write_whole(folder / "config.json", read_text(model, "--model"))
        return folder
    raise ValueError(f"--model {model} is neither a config.json nor a folder that has one")


def _without_names(stage: Stage, names: Mapping[str, str]) -> Stage:
    def clean(text: str) -> str:
        return without_names(text, names)

    checks = tuple(
        replace(
            one,
            found=clean(one.found),
            problem=None if one.problem is None else clean(one.problem),
        )
        for one in stage.checks
    )
    log = tuple(clean(line) for line in stage.log)
    return replace(stage, checks=checks, why=clean(stage.why), log=log)


def _show_stage(console: Console, stage: Stage) -> None:
    colour = _COLOURS[stage.status]
    seconds = f" in {stage.seconds:.0f} s" if stage.seconds else ""
    why = f": {escape(stage.why)}" if stage.status == "skipped" else ""
    console.print(f"{stage.name}: [{colour}]{stage.status}[/]{seconds}{why}")


def show(console: Console, verdict: Verdict) -> None:
    """Print the table, the log of what failed, and the verdict."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("stage", "check", "found"):
        table.add_column(heading, no_wrap=heading == "stage")
    table.add_column("s", justify="right")
    for stage in verdict.stages:
        for check in stage.checks:
            found = escape(check.found)
            if check.problem is not None:
                found = f"[bold red]{escape(check.problem)}[/]"
            seconds = f"{check.seconds:.1f}" if check.seconds else ""
            table.add_row(stage.name, escape(check.name), found, seconds)
    console.print(table)
    if (failed := verdict.failed) is not None:
        if failed.log:
            console.print(f"Last lines of '{failed.name}':")
            for line in failed.log:
                console.print(f"  {line}", markup=False, soft_wrap=True)
        console.print(f"[bold red]{escape(verdict.sentence)}[/]")
    else:
        console.print(f"[green]{escape(verdict.sentence)}[/]")

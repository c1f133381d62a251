"""`pat-vllm doctor`: is this machine fit? Progress, the table, and JSON."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pat_vllm.cli.options import check_engine, options_of
from pat_vllm.doctor.doctor_options import Options

if TYPE_CHECKING:  # this is slow to import, for `--help`
    from pat_vllm.doctor.report import Report, Stage

_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "dim"}


@options_of(Options)
def run_doctor(options: Options) -> None:
    """Test whether this machine is fit: environment, memory, and engines against stock vLLM.

    Nothing is downloaded: the self-test's models are random. Exits with 1 when a stage fails.
    """
    report = examine(Console(highlight=False), options)
    if report.failed is not None:
        raise typer.Exit(1)


def examine(console: Console, options: Options) -> Report:
    """Run the stages, print what they find, and write it."""
    from pat_vllm.cli.doctor_models import self_test_models, shape_of
    from pat_vllm.doctor.child import ending_by_signals
    from pat_vllm.doctor.report import REPORT, Report
    from pat_vllm.doctor.stages import STAGES, run_stages
    from pat_vllm.files.reading import shown
    from pat_vllm.files.writing import write_whole
    from pat_vllm.start.gpus import gpu_named

    check_engine(options.engine, options.pat, options.ranks)
    for name in options.stage or ():
        if name not in STAGES:
            raise ValueError(f"--stage {shown(name)} is not known; allowed: {', '.join(STAGES)}")
    shape = shape_of(options.shape, options.speculate)
    if options.gpu is not None:
        gpu_named(options.gpu)
        if options.model is None:
            raise ValueError("--gpu computes memory for a model: name one by --model")
    if (output := options.output_dir) is not None:
        output.mkdir(parents=True, exist_ok=True)
        if not os.access(output, os.W_OK):
            raise PermissionError(f"--output-dir {output} may not be written to; name another")
    command = shlex.join(["pat-vllm", *sys.argv[1:]])
    with ExitStack() as stack:
        stack.enter_context(ending_by_signals())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pat-vllm-doctor-")))
        if options.model is not None:
            options = replace(options, model=_checkpoint(options.model, scratch / "model"))
        began = time.monotonic()
        status = stack.enter_context(console.status("starting"))

        def doing(what: str) -> None:
            text = f"[{time.monotonic() - began:4.0f} s] {what}"
            status.update(escape(text))
            if not console.is_terminal:
                console.print(text, markup=False)

        make_models = partial(self_test_models, scratch, shape, options.ranks, options.speculate)
        stages: list[Stage] = []
        report = Report("", command, ())
        for stage in run_stages(options, make_models, doing):
            stages.append(stage)
            date = datetime.now(UTC).isoformat(timespec="seconds")
            report = Report(date, command, tuple(stages)).without_names()
            if output is not None:  # now: what is killed leaves what it has
                text = REPORT.dump_json(report, indent=1).decode()
                write_whole(output / "doctor.json", text + "\n")
            seconds = f" in {stage.seconds:.0f} s" if stage.seconds else ""
            why = f": {escape(stage.why)}" if stage.status == "skipped" else ""
            status_of = f"[{_COLOURS[stage.status]}]{stage.status}[/]"
            console.print(f"{stage.name}: {status_of}{seconds}{why}")
        status.stop()
    show(console, report)
    if output is not None:
        console.print(f"written: {output}/doctor.json", soft_wrap=True)
    return report


def _checkpoint(model: Path, folder: Path) -> Path:
    """The folder of a model that has at least its config."""
    from pat_vllm.files.reading import read_text
    from pat_vllm.files.writing import write_whole

    if model.is_dir() and (model / "config.json").is_file():
        return model.resolve()
    if model.is_file():
        folder.mkdir()
        write_whole(folder / "config.json", read_text(model, "--model"))
        return folder
    raise ValueError(f"--model {model} is neither a config.json nor a folder that has one")


def show(console: Console, report: Report) -> None:
    """Print the table, the log of what failed, and the conclusion."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("stage", "check", "found"):
        table.add_column(heading, no_wrap=heading == "stage")
    table.add_column("s", justify="right")
    for stage in report.stages:
        for check in stage.checks:
            cell = escape(check.found)
            if check.problem is not None:
                cell = f"[bold red]{escape(check.problem)}[/]"
            seconds = f"{check.seconds:.1f}" if check.seconds else ""
            table.add_row(stage.name, escape(check.name), cell, seconds)
    console.print(table)
    if (failed := report.failed) is not None and failed.log:
        console.print(f"Last lines of '{failed.name}':")
        for line in failed.log:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    colour = "green" if failed is None else "bold red"
    console.print(f"[{colour}]{escape(report.conclusion)}[/]")

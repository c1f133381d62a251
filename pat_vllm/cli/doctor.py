"""`pat-vllm doctor`: is this machine fit? Progress, the table, and JSON."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pat_vllm.cli.options import check_engine, options_of
from pat_vllm.cli.ranges import EngineOptions, PATOptions, Ranged

if TYPE_CHECKING:  # this is slow to import, for `--help`
    from pat_vllm.doctor.report import Check, Report
    from pat_vllm.doctor.request import Request


@dataclass(frozen=True)
class DoctorOptions(Ranged):
    """Each is an option of the command, with what its help says."""

    ranks: Annotated[
        int, typer.Option(min=2, max=1024, help="Worker processes, one for each GPU.")
    ] = 2
    pat: PATOptions = field(default_factory=dict)
    engine: EngineOptions = field(default_factory=dict)
    shape: Annotated[
        str,
        typer.Option(
            help="Of the random model: dense, large, mixture, linear or latent (attention), window "
            "or sinks (sliding windows), mtp (with an MTP module)."
        ),
    ] = "dense"
    drafter: Annotated[
        str,
        typer.Option(
            help="With weights: mtp, of a random model with an MTP module, or draft_model, the "
            "random model itself."
        ),
    ] = ""
    eager: Annotated[
        bool, typer.Option("--eager", help="Without torch.compile and CUDA graphs.")
    ] = False
    output_dir: Annotated[Path | None, typer.Option(help="Where to write doctor.json.")] = None


@options_of(DoctorOptions)
def run_doctor(options: DoctorOptions) -> None:
    """Test whether this machine is fit for your engine: PAT against stock vLLM, on a random model.

    Nothing is downloaded. Exits with 1 when a check fails.
    """
    from pat_vllm.doctor.request import Request

    check_engine(options.engine, options.pat, options.ranks)
    eager = {"enforce_eager": True} if options.eager else {}
    engine = {**options.engine, **eager}
    shape = "mtp" if (options.drafter, options.shape) == ("mtp", "dense") else options.shape
    request = Request(options.ranks, shape, engine, options.pat, options.drafter)
    request.check()
    if (output := options.output_dir) is not None:
        output.mkdir(parents=True, exist_ok=True)
        if not os.access(output, os.W_OK):
            raise PermissionError(f"--output-dir {output} may not be written to; name another")
    if not examined(Console(highlight=False), request, output).fit:
        raise typer.Exit(1)


def examined(console: Console, request: Request, output: Path | None) -> Report:
    """Run the checks, print what they find, and write it."""
    from pat_vllm.doctor.child import ending_by_signals
    from pat_vllm.doctor.report import REPORT, Report
    from pat_vllm.doctor.run import examine
    from pat_vllm.files.writing import write_whole

    date, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    report = Report(date, shlex.join(["pat-vllm", *sys.argv[1:]]))

    def write(**changed: object) -> None:
        nonlocal report
        report = replace(report, **changed).without_names()  # type: ignore[arg-type]
        if output is not None:
            text = REPORT.dump_json(report, indent=1).decode()
            write_whole(output / "doctor.json", text + "\n")

    def doing(what: str) -> None:
        text = f"[{time.monotonic() - began:4.0f} s] {what}"
        status.update(escape(text))
        if not console.is_terminal:
            console.print(text, markup=False)

    def found(check: Check) -> None:  # it is written now: what is killed leaves what it has
        write(checks=(*report.checks, check))

    with ending_by_signals(), console.status("starting") as status:
        log = examine(request, doing, found)
    write(fit=not any(check.problem for check in report.checks), log=log)
    show(console, report)
    if output is not None:
        console.print(f"written: {output}/doctor.json", soft_wrap=True)
    return report


def show(console: Console, report: Report) -> None:
    """Print the table, the log of what failed, and the conclusion."""
    table = Table("check", "found", box=box.SIMPLE, pad_edge=False)
    table.add_column("s", justify="right")
    for check in report.checks:
        wrong = f"[bold red]{escape(check.problem)}[/]" if check.problem else ""
        table.add_row(escape(check.name), wrong or escape(check.found), f"{check.seconds:.1f}")
    console.print(table)
    if report.log:
        console.print("Last lines of the log:")
    for line in report.log:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    colour = "green" if report.fit else "bold red"
    console.print(f"[{colour}]{escape(report.conclusion)}[/]")

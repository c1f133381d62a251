"""`pat-vllm advise`."""

from pathlib import Path
from typing import Annotated

import typer

from pat_vllm.advice.options import AdviseOptions
from pat_vllm.cli.options import options_of


@options_of(AdviseOptions)
def advise_user(
    options: AdviseOptions,
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="Processes among which the work is spread.")
    ] = 2,
    output: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to write.")] = None,
) -> None:
    """Say whether PAT would pay for your rollouts, and with which settings. Simulated."""
    from rich.console import Console

    from pat_vllm.cli.advise import run_advise

    run_advise(Console(highlight=False), options, processes=processes, output=output, plot=plot)

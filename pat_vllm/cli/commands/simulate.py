"""Options of `pat-vllm simulate`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def _moved(to: str) -> Callable[..., None]:
    """Callback of an option that lives elsewhere now."""

    def refuse(given: str | None) -> None:
        if given is not None:
            raise typer.BadParameter(f"moved: {to}, in a checkout of pat-vllm")

    return refuse


def _moved_option(to: str) -> Any:
    return typer.Option(hidden=True, callback=_moved(to), help=f"Moved: {to}.")


_PAPER = "python -m benchmarks.paper simulate"


def run_simulation(
    profile: Annotated[
        Path, typer.Option(help="Profile of the engine, as `pat-vllm profile` writes it.")
    ],
    lengths: Annotated[
        Path | None, typer.Option(help="Response lengths: a JSON trace, or one per line.")
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="Without --lengths: deepscaler, log-normal, two-mode, alike, uniform, straggler, "
            "grpo."
        ),
    ] = "deepscaler",
    iterations: Annotated[
        int, typer.Option(min=1, max=10_000, help="Batches, one after another.")
    ] = 3,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests in a batch.")] = 128,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", "--bound", min=1, max=1 << 24, help="Longest response, tokens."
        ),
    ] = 16384,
    seed: Annotated[int, typer.Option(min=0, max=1 << 62, help="Of the lengths.")] = 0,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where to write JSON, Markdown and PNG.")
    ] = None,
    gpu: Annotated[str | None, _moved_option(f"{_PAPER} --gpu")] = None,
    model: Annotated[str | None, _moved_option(f"{_PAPER} --model")] = None,
    ranks: Annotated[str | None, _moved_option(f"{_PAPER} --ranks")] = None,
    switch_cost: Annotated[str | None, _moved_option(f"{_PAPER} --switch-cost")] = None,
    seeds: Annotated[str | None, _moved_option("python -m benchmarks.paper settings")] = None,
    paper: Annotated[
        bool | None,
        typer.Option(
            "--paper", hidden=True, callback=_moved("python -m benchmarks.paper settings")
        ),
    ] = None,
) -> None:
    """Replay response lengths on an engine's profile: every static layout, and PAT."""
    from rich.console import Console

    from pat_vllm.cli.simulate import simulate_workload

    try:
        simulate_workload(
            Console(highlight=False),
            profile=profile,
            lengths=lengths,
            workload=workload,
            iterations=iterations,
            requests=requests,
            max_tokens=max_tokens,
            seed=seed,
            output_dir=output_dir,
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error

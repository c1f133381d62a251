"""`python -m benchmarks.paper settings` and `simulate`: modelled hardware, the paper's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Static layouts, the paper's policy, this one and a clairvoyant on the same batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

_Requests = Annotated[int, typer.Option(min=1, help="Requests in a batch.")]
_Seed = Annotated[int, typer.Option(min=0, help="Of the lengths.")]
_OutputDir = Annotated[Path | None, typer.Option(help="Where to write JSON, Markdown and PNG.")]


@app.command("settings")
def run_settings(
    seeds: Annotated[int, typer.Option(min=1, help="Batches per setting.")] = 5,
    requests: _Requests = 128,
    seed: _Seed = 0,
    output_dir: _OutputDir = None,
) -> None:
    """The settings of arXiv 2605.23945, on modelled profiles."""
    from benchmarks.paper.tables import simulate_settings

    simulate_settings(
        Console(highlight=False), seeds=seeds, seed=seed, requests=requests, output_dir=output_dir
    )


@app.command("simulate")
def run_simulation(
    gpu: Annotated[str, typer.Option(help="GPU to model: H100, H200, A40.")] = "H100",
    model: Annotated[
        str, typer.Option(help="llama-3.1-8b, qwen3-14b, or a path of a config.json.")
    ] = "llama-3.1-8b",
    ranks: Annotated[int, typer.Option(min=1, help="GPUs to model.")] = 8,
    profile: Annotated[
        Path | None, typer.Option(help="Profile of an engine, in place of modelled hardware.")
    ] = None,
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
    iterations: Annotated[int, typer.Option(min=1, help="Batches, one after another.")] = 3,
    requests: _Requests = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response, tokens.")] = 16384,
    switch_cost: Annotated[
        float, typer.Option(min=0.001, help="Seconds of a switch that counts as expensive.")
    ] = 5.52,
    seed: _Seed = 0,
    output_dir: _OutputDir = None,
) -> None:
    """One workload on modelled hardware or on a profile, under every policy."""
    from benchmarks.paper.tables import simulate_modelled

    try:
        simulate_modelled(
            Console(highlight=False),
            gpu=gpu,
            model=model,
            ranks=ranks,
            profile=profile,
            lengths=lengths,
            workload=workload,
            iterations=iterations,
            requests=requests,
            max_tokens=max_tokens,
            switch_cost=switch_cost,
            seed=seed,
            output_dir=output_dir,
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.paper")

"""`python -m benchmarks.simulated NAME`: tables of simulated settings, in Markdown."""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.simulated import drafts, elimination, mixture, paper
from benchmarks.simulated.replay import Setting

app = typer.Typer(
    help="Policies on synthetic responses. Everything here is simulated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

_Count = Annotated[int, typer.Option("--seeds", min=1, help="Batches, after one to learn from.")]
_Processes = Annotated[int, typer.Option(min=1, help="Among which the settings are spread.")]
_Write = Annotated[bool, typer.Option(help="Write to benchmarks/results.")]
_Gpu = Annotated[str | None, typer.Option(help="One setting in place of all: its GPU.")]


@app.command("paper")
def run_paper(
    gpu: _Gpu = None,
    model: str = "llama-3.1-8b",
    ranks: int = 8,
    requests: int = paper.BATCH,
    max_tokens: int = 16384,
    workload: str = "deepscaler",
    count: _Count = 5,
    processes: _Processes = 1,
    write: _Write = False,
) -> None:
    """The settings of arXiv 2605.23945, under its policy, PAT's and a clairvoyant."""
    settings = [*paper.SETTINGS]
    if gpu is not None:
        settings = [Setting(gpu, model, requests, max_tokens, workload=workload, ranks=ranks)]
    print(paper.comparison(count).make(settings, processes, write))


@app.command("drafts")
def run_drafts(
    gpu: _Gpu = None,
    model: str = "llama-3.1-8b",
    requests: int = 1024,
    max_tokens: int = 16384,
    acceptance: float = 0.5,
    drafting: Annotated[float, typer.Option(help="Seconds of the drafter in a step.")] = 0.0,
    workload: str = "deepscaler",
    wrong: Annotated[str, typer.Option(help="E.g. `steps x 2`, `acceptance / 2`.")] = "",
    count: _Count = 2,
    processes: _Processes = 1,
    write: _Write = False,
) -> None:
    """Layout and draft length, planned together, against every static layout and draft length."""
    settings = [*drafts.usual_settings()]
    if gpu is not None:
        settings = [
            Setting(gpu, model, requests, max_tokens, acceptance, drafting, workload, wrong)
        ]
    print(drafts.comparison(count).make(settings, processes, write))


@app.command("mixture")
def run_mixture(
    gpu: Annotated[list[str], typer.Option(help="May be repeated.")] = ["H100", "H200"],  # noqa: B006
    workload: Annotated[list[str], typer.Option(help="May be repeated.")] = ["grpo", "deepscaler"],  # noqa: B006
    prompts: int = 512,
    count: _Count = 2,
    processes: _Processes = 1,
    write: _Write = False,
) -> None:
    """Qwen3-30B-A3B with experts that are cut, spread, and both in turn."""
    settings = [*mixture.settings(gpu, workload, prompts)]
    print(mixture.comparison(count).make(settings, processes, write))


@app.command("elimination")
def run_elimination(
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", help="`8 x H100` for a modelled one, or a profile's file."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Per workload.")] = 10,
    wrong_seeds: Annotated[int, typer.Option(min=0, help="Likewise, with wrong profiles.")] = 3,
    processes: Annotated[int, typer.Option(min=1, help="At once.")] = 2,
    part: Annotated[list[str] | None, typer.Option(help="May be dropped; default: all.")] = None,
    steps: Annotated[bool, typer.Option(help="Only how well steps are predicted.")] = False,
) -> None:
    """Which parts of the predictor earn their place."""
    if unknown := {*(part or ())} - set(elimination.PARTS):
        raise typer.BadParameter(f"no such part: {unknown}; there are {[*elimination.PARTS]}")
    names = engines or ["8 x H100", "8 x A40", "pat_vllm/simulator/modelled/measured.json"]
    if steps:
        print(elimination.held_out(names, seeds))
    else:
        print(elimination.eliminate(names, seeds, wrong_seeds, processes, part))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.simulated")

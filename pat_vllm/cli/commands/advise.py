"""Options of `pat-vllm advise`."""

from pathlib import Path
from typing import Annotated

import typer


def advise_user(
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint's directory or config.json; llama-3.1-8b, qwen3-14b, qwen3-30b-a3b."
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Modelled GPU: A40, H100, H200.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of the engine, of a node.")] = 8,
    profile: Annotated[
        Path | None, typer.Option(help="An engine's profile in place of --gpu and --gpus.")
    ] = None,
    responses: Annotated[
        int, typer.Option(help="Of an iteration, on these GPUs: prompts x samples.")
    ] = 1024,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Earlier rollouts: a JSON array of lengths, one per line, or JSON lines of a "
            "trainer's dump."
        ),
    ] = None,
    shape: Annotated[
        str,
        typer.Option(
            help="Without --lengths: deepscaler, log-normal, two-mode, alike, uniform, straggler, "
            "grpo."
        ),
    ] = "deepscaler",
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest response; the longest in --lengths, or 16384."),
    ] = None,
    acceptance: Annotated[
        float,
        typer.Option(help="Share of first draft tokens accepted; 0: no drafts."),
    ] = 0.0,
    drafting: Annotated[
        float, typer.Option(help="Seconds a drafter adds to a step; with --gpu.")
    ] = 0.0,
    max_num_seqs: Annotated[int, typer.Option(help="Of a GPU, as in vLLM; with --gpu.")] = 256,
    iterations: Annotated[
        int | None, typer.Option(help="That are replayed, each drawn anew; 8, or 6 with drafts.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    processes: Annotated[int, typer.Option(min=1, max=256, help="That share the work.")] = 2,
    output: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to write.")] = None,
) -> None:
    """Say whether PAT would pay for your rollouts, and with which settings. Simulated."""
    from rich.console import Console

    from pat_vllm.cli.advise import Question, run_advise

    try:
        question = Question(
            model=model,
            gpu=gpu,
            gpus=gpus,
            profile=profile,
            responses=responses,
            lengths=lengths,
            shape=shape,
            max_tokens=max_tokens,
            acceptance=acceptance,
            drafting=drafting,
            max_num_seqs=max_num_seqs,
            iterations=iterations,
            seed=seed,
        )
        run_advise(
            Console(highlight=False), question, processes=processes, output=output, plot=plot
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error

"""Options of `pat-vllm demo`."""

from pathlib import Path
from typing import Annotated

import typer

from pat_vllm.cli.options import a_number, missing
from pat_vllm.text_only import without_vision_and_audio


def run_demo(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint to use instead of a random model. Other random models: `repeating`, "
            "whose text repeats itself, so that drafts are accepted; `moe`, a mixture of experts."
        ),
    ] = None,
    models_dir: Annotated[
        Path, typer.Option(help="Where a random model (0.7 GB) is made once and kept.")
    ] = Path(".models"),
    ranks: Annotated[int, typer.Option(min=2, max=1024, help="Worker processes.")] = 2,
    requests: Annotated[int, typer.Option(min=2, max=100_000, help="Requests in the batch.")] = 128,
    max_tokens: Annotated[
        int, typer.Option(min=8, max=1 << 24, help="Longest response, tokens.")
    ] = 320,
    switch_at: Annotated[
        int, typer.Option(min=1, max=100_000, help="Live requests at which to switch.")
    ] = 16,
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Speculative decoding in all runs: n-gram drafts.")
    ] = False,
    num_speculative_tokens: Annotated[
        int,
        typer.Option(min=1, max=1024, help="With --speculate: draft tokens a request and step."),
    ] = 4,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, max=100, callback=a_number, help="0 is greedy; 1 by default, 0 with --speculate."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=1 << 62, help="Of prompts, lengths and sampling.")
    ] = 0,
    rounds: Annotated[
        int, typer.Option(min=2, max=1000, help="How often each way has its turn.")
    ] = 3,
    output: Annotated[Path, typer.Option(help="PNG to write.")] = Path("demo.png"),
) -> None:
    """Run a long-tail batch as replicas, as one group, and switching; compare and plot.

    The three ways take turns on one engine. Exits with 1 when their outputs are not the same, token
    by token.
    """
    from rich.console import Console

    from pat_vllm.cli.demo import demo
    from pat_vllm.cli.engine_run import RunFailed

    without_vision_and_audio()
    try:
        agree = demo(
            Console(highlight=False),
            model=model,
            models_dir=models_dir,
            ranks=ranks,
            requests=requests,
            max_tokens=max_tokens,
            switch_at=switch_at,
            num_speculative_tokens=num_speculative_tokens if speculate else 0,
            temperature=float(not speculate) if temperature is None else temperature,
            seed=seed,
            rounds=rounds,
            output=output,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except ImportError as error:
        raise missing(error) from error
    except (RunFailed, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if not agree:
        raise typer.Exit(1)

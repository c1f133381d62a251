"""The `pat-vllm` command."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="pat-vllm",
    help="Tensor parallelism that changes during generation.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Tensor parallelism that changes during generation."""
    # Without a callback, Typer would turn an only command into the program itself.


@app.command("random-model")
def write_random_model(
    path: Annotated[Path, typer.Argument(help="Directory to write; must be new or empty.")],
    arch: Annotated[str, typer.Option(help="qwen3, qwen2 or llama.")] = "qwen3",
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 128,
    layers: Annotated[int, typer.Option(help="Number of decoder layers.")] = 3,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of one head.")] = 32,
    intermediate: Annotated[int, typer.Option(help="Width of the MLP.")] = 256,
    vocab: Annotated[int, typer.Option(help="Vocabulary size; at least 259.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_position_embeddings: Annotated[int, typer.Option(help="Longest context, tokens.")] = 2048,
    tie: Annotated[bool, typer.Option(help="Tie the output head to the embeddings.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a random model with a tokenizer: real shapes and timings without a download."""
    from pat_vllm.cli.random_model import make_model

    try:
        parameters = make_model(
            path,
            arch=arch,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            vocab=vocab,
            dtype=dtype,
            max_position_embeddings=max_position_embeddings,
            tie=tie,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo(f"{path}: {arch}, {parameters / 1e6:.1f}M parameters, {dtype}")


@app.command("demo")
def run_demo(
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint to use instead of a random model.")
    ] = None,
    models_dir: Annotated[
        Path, typer.Option(help="Where the random model (0.7 GB) is made once and kept.")
    ] = Path(".models"),
    ranks: Annotated[int, typer.Option(min=2, help="Worker processes.")] = 2,
    requests: Annotated[int, typer.Option(min=2, help="Requests in the batch.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest response, tokens.")] = 320,
    switch_at: Annotated[int, typer.Option(min=1, help="Live requests at which to switch.")] = 16,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and sampling.")] = 0,
    output: Annotated[Path, typer.Option(help="PNG to write.")] = Path("demo.png"),
) -> None:
    """Run a long-tail batch as replicas, as one group, and switching; compare and plot.

    Exits with 1 when the outputs of the three runs are not the same, token by token.
    """
    from rich.console import Console

    from pat_vllm.cli.demo import demo
    from pat_vllm.cli.engine_run import RunFailed

    try:
        agree = demo(
            Console(highlight=False),
            model=model,
            models_dir=models_dir,
            ranks=ranks,
            requests=requests,
            max_tokens=max_tokens,
            switch_at=switch_at,
            temperature=temperature,
            seed=seed,
            output=output,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except RunFailed as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if not agree:
        raise typer.Exit(1)

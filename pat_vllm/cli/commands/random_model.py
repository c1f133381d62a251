"""Options of `pat-vllm random-model`."""

from pathlib import Path
from typing import Annotated

import typer

from pat_vllm.cli.options import missing
from pat_vllm.text_only import without_vision_and_audio


def write_random_model(
    path: Annotated[Path, typer.Argument(help="Directory to write; must be new or empty.")],
    arch: Annotated[
        str,
        typer.Option(
            help="qwen3, qwen2, llama; mixtures of experts: qwen3_moe, qwen2_moe, mixtral, olmoe, "
            "glm4_moe."
        ),
    ] = "qwen3",
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 128,
    layers: Annotated[int, typer.Option(help="Number of decoder layers.")] = 3,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of one head.")] = 32,
    intermediate: Annotated[int, typer.Option(help="Width of the MLP.")] = 256,
    vocab: Annotated[int, typer.Option(help="Vocabulary size; from 259 on, of bytes.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_position_embeddings: Annotated[int, typer.Option(help="Longest context, tokens.")] = 2048,
    tie: Annotated[bool, typer.Option(help="Tie the output head to the embeddings.")] = False,
    gain: Annotated[float, typer.Option(help="Spread of the logits; less is more even.")] = 4.0,
    repeat: Annotated[
        float, typer.Option(help="How much its text repeats a phrase; 0 is not, 1.5 is mostly.")
    ] = 0.0,
    phrase: Annotated[int, typer.Option(help="Tokens of that phrase.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write a random model with a tokenizer: real shapes and timings without a download."""
    from pat_vllm.cli.random_model import make_model

    without_vision_and_audio()
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
            gain=gain,
            repeat=repeat,
            phrase=phrase,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except ImportError as error:
        raise missing(error) from error
    except (OSError, RuntimeError) as error:  # too little memory
        typer.echo(f"{path} cannot be written: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"{path}: {arch}, {parameters / 1e6:.1f}M parameters, {dtype}")

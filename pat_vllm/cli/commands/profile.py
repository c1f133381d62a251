"""Options of `pat-vllm profile`."""

from pathlib import Path
from typing import Annotated

import typer

from pat_vllm.cli.options import a_number, missing
from pat_vllm.text_only import without_vision_and_audio


def take_engine_profile(
    model: Annotated[str, typer.Argument(help="Checkpoint, as vLLM takes it.")],
    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, max=1024, help="Ranks of the engine.")
    ] = 2,
    dtype: Annotated[str, typer.Option(help="As in vLLM.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(min=-1, max=1 << 31, help="As in vLLM.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, max=1 << 31, help="As in vLLM.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, max=1 << 31, help="As in vLLM.")
    ] = None,
    enforce_eager: Annotated[bool, typer.Option(help="As in vLLM.")] = False,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(min=1, max=1 << 62, help="As in vLLM.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(min=1, max=1 << 20, help="As in vLLM.")] = None,
    speculative_config: Annotated[
        str | None, typer.Option(help="As in vLLM, a JSON object: steps with drafts, too.")
    ] = None,
    pat: Annotated[
        str | None,
        typer.Option(help="PAT's options of the engine (base_tp, experts, ...), a JSON object."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON to write; named after the engine by default.")
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="Measure only what an engine's start would measure.")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option(
            min=1, max=1e6, callback=a_number, help="Seconds after which the rest is left out."
        ),
    ] = None,
) -> None:
    """Measure an engine's steps and switches; run it again to go on after an interruption.

    The profile holds for engines with the same flags in the same environment, named in
    pat.policy.profile.
    """
    from rich.console import Console

    from pat_vllm.cli.options import json_object
    from pat_vllm.cli.profile import engine_arguments, take_profile
    from pat_vllm.profiling.profile import ProfileError

    without_vision_and_audio()
    try:
        engine = engine_arguments(
            model,
            json_object("--pat", pat) or {},
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enforce_eager=enforce_eager,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            speculative_config=json_object("--speculative-config", speculative_config),
        )
        take_profile(Console(highlight=False), engine, output, quick, budget)
    except ImportError as error:
        raise missing(error) from error
    except (ProfileError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except RuntimeError as error:
        typer.echo(f"the engine failed: {error}", err=True)
        raise typer.Exit(1) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error

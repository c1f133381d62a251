"""Options of `pat-vllm doctor`."""

from pathlib import Path
from typing import Annotated

import typer

from pat_vllm.cli.options import missing
from pat_vllm.text_only import without_vision_and_audio


def run_doctor(
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a checkpoint, or a config.json: what is refused, and memory."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="Compute for so many of this GPU (A40, H100, H200); start no engine."),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=2, max=1024, help="Worker processes, one for each GPU.")
    ] = 2,
    pat: Annotated[
        str | None,
        typer.Option(help="PAT's options of the engine (base_tp, experts, ...), a JSON object."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Further options of vLLM's LLM, as a JSON object.")
    ] = None,
    shape: Annotated[
        str,
        typer.Option(help="Of the random model: tiny, moe, large, or model (like --model)."),
    ] = "tiny",
    dtype: Annotated[
        str | None, typer.Option(help="Of the random model; float32 on CPU, else bfloat16.")
    ] = None,
    speculate: Annotated[
        int,
        typer.Option(min=0, max=1024, help="Longest n-gram drafts of the self-test; 0 is none."),
    ] = 0,
    all_stages: Annotated[
        bool,
        typer.Option("--all", help="Also engines with CUDA graphs, one as you use it, figures."),
    ] = False,
    figures: Annotated[
        bool, typer.Option("--figures", help="Also measure: copies, moves, decode steps, memory.")
    ] = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where to write doctor.json and doctor.png.")
    ] = None,
) -> None:
    """Test whether this machine is fit: environment, memory, and engines against stock vLLM.

    Nothing is downloaded: the self-test's models are random. Exits with 1 when a stage fails.
    """
    from rich.console import Console

    from pat_vllm.cli.doctor import doctor
    from pat_vllm.cli.options import json_object

    # Here random models are made; the processes of the stages say if one of these is in their way.
    without_vision_and_audio()
    try:
        fit = doctor(
            Console(highlight=False),
            model=model,
            gpu=gpu,
            ranks=ranks,
            pat=json_object("--pat", pat) or {},
            engine=json_object("--engine", engine) or {},
            shape=shape,
            dtype=dtype,
            draft_length=speculate,
            all_stages=all_stages,
            figures=figures,
            output_dir=output_dir,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except ImportError as error:
        raise missing(error) from error
    except OSError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if not fit:
        raise typer.Exit(1)

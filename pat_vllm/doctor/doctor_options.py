"""What a user asks of the doctor: the options of `pat-vllm doctor`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from pat_vllm.cli.ranges import EngineOptions, PATOptions, Ranged


@dataclass(frozen=True)
class Options(Ranged):
    """Each is an option of the command, with what its help says."""

    model: Annotated[
        Path | None,
        typer.Option(help="Folder of a checkpoint, or a config.json: what is refused, and memory."),
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(help="Compute for so many of this GPU (A40, H100, H200); start no engine."),
    ] = None
    ranks: Annotated[
        int, typer.Option(min=2, max=1024, help="Worker processes, one for each GPU.")
    ] = 2
    pat: PATOptions = field(default_factory=dict)
    engine: EngineOptions = field(default_factory=dict)
    shape: Annotated[
        str,
        typer.Option(
            help="Of the random model: tiny, moe, linear or latent (attention), window or sinks "
            "(sliding windows), or large."
        ),
    ] = "tiny"
    dtype: Annotated[
        str | None, typer.Option(help="Of the random model; float32 on CPU, else bfloat16.")
    ] = None
    speculate: Annotated[
        int,
        typer.Option(min=0, max=1024, help="Longest n-gram drafts of the self-test; 0 is none."),
    ] = 0
    all: Annotated[
        bool, typer.Option("--all", help="Also engines with CUDA graphs, and one as you use it.")
    ] = False
    stage: Annotated[
        list[str] | None,
        typer.Option(help="Run this stage alone, after `environment`; may be given several times."),
    ] = None
    output_dir: Annotated[Path | None, typer.Option(help="Where to write doctor.json.")] = None

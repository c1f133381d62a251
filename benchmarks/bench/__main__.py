"""`python -m benchmarks.bench`: real engines, static and adaptive, on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.record import RESULTS

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    model: Annotated[
        Path | None, typer.Option(help="Checkpoint to use instead of a random model.")
    ] = None,
    models_dir: Annotated[
        Path, typer.Option(help="Where the random model (0.7 GB) is made once and kept.")
    ] = Path(".models"),
    ranks: Annotated[int, typer.Option(min=2, help="Worker processes of each engine.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="Batches of each workload.")] = 5,
    workloads: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; all by default: lognormal, two_mode, uniform_short, "
            "uniform_long, straggler, staggered, shift."
        ),
    ] = None,
    lengths: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of earlier rollouts' lengths, as `pat-vllm advise` takes it, in place of "
            "a named workload. May be repeated."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Of a batch with --lengths.")] = 96,
    scale: Annotated[str, typer.Option(help="Size of the batches: full, half or tiny.")] = "full",
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and lengths.")] = 0,
    output_dir: Annotated[Path, typer.Option(help="Where to write.")] = RESULTS,
    picture: Annotated[Path | None, typer.Option(help="PNG to write besides.")] = None,
) -> None:
    """Serve the same batches with static and adaptive engines in turns."""
    from benchmarks.bench.engines import BenchSettings
    from benchmarks.bench.run import bench
    from benchmarks.bench.workloads import SCALES, choose, from_lengths
    from benchmarks.engine_process import EngineFailed
    from pat_vllm.cli.demo_batch import demo_model

    try:
        if scale not in SCALES:
            raise ValueError(f"--scale is {scale!r}; allowed are {', '.join(SCALES)}")
        chosen = () if workloads is None and lengths else choose(workloads)
        chosen += tuple(from_lengths(path, requests) for path in lengths or ())
        checkpoint = (demo_model(models_dir) if model is None else model).resolve()
        settings = BenchSettings(checkpoint, ranks, chosen, repeats, scale, seed)
        bench(settings, output_dir, picture)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    except EngineFailed as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.bench")

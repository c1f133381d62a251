"""`python -m benchmarks.bench`: real engines, static and adaptive, on the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
            "uniform_long, straggler, staggered, shift; and, with speculation and models of their "
            "own, repeating, unpredictable, changing."
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
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Where to write; benchmarks/results in a checkout, else here."),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="PNG to write besides.")] = None,
) -> None:
    """Serve the same batches with static and adaptive engines in turns; judge by a clairvoyant."""
    from benchmarks.bench.run import bench
    from benchmarks.bench.speculative.measure import bench_speculative
    from benchmarks.bench.speculative.workloads import SPECULATIVE, SpeculativeWorkload
    from benchmarks.bench.workloads import SCALES, WORKLOADS, Workload, choose, from_lengths
    from benchmarks.engine_process import EngineFailed

    console = Console(highlight=False)
    try:
        if scale not in SCALES:
            raise ValueError(f"--scale is {scale!r}; allowed are {', '.join(SCALES)}")
        if workloads is None and lengths:
            chosen: tuple[Workload, ...] = ()
        else:
            chosen = choose(workloads, {**WORKLOADS, **SPECULATIVE})
        chosen += tuple(from_lengths(path, requests) for path in lengths or ())
        speculative = tuple(one for one in chosen if isinstance(one, SpeculativeWorkload))
        if speculative and model is not None:
            if workloads is not None:
                raise ValueError(
                    f"--model is given, but {speculative[0].name} has a model of its own"
                )
            speculative = ()
        if plain := tuple(one for one in chosen if not isinstance(one, SpeculativeWorkload)):
            bench(
                console,
                model=model,
                models_dir=models_dir,
                ranks=ranks,
                repeats=repeats,
                workloads=plain,
                scale=scale,
                seed=seed,
                output_dir=output_dir,
                picture=picture,
            )
        if speculative:
            bench_speculative(
                console,
                workloads=speculative,
                models_dir=models_dir,
                ranks=ranks,
                repeats=repeats,
                scale=scale,
                seed=seed,
                output_dir=output_dir,
            )
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    except EngineFailed as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.bench")

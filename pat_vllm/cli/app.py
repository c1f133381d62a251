"""`pat-vllm`. What commands are slow to import they import when they run."""

from typing import Annotated

import typer

from pat_vllm import __version__
from pat_vllm.cli.advise import advise_user
from pat_vllm.cli.doctor import run_doctor
from pat_vllm.cli.profile import take_engine_profile
from pat_vllm.cli.random_model import write_random_model

app = typer.Typer(
    name="pat-vllm",
    help="Tensor parallelism that changes during generation.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("random-model")(write_random_model)
app.command("doctor")(run_doctor)
app.command("profile")(take_engine_profile)
app.command("advise")(advise_user)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pat-vllm {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Tensor parallelism that changes during generation."""
    # Without a callback, Typer would turn an only command into the program itself.

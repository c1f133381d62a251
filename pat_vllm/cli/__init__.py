"""The `pat-vllm` command."""

import multiprocessing

import typer

from pat_vllm.cli.commands.advise import advise_user
from pat_vllm.cli.commands.demo import run_demo
from pat_vllm.cli.commands.doctor import run_doctor
from pat_vllm.cli.commands.plot import plot_report
from pat_vllm.cli.commands.profile import take_engine_profile
from pat_vllm.cli.commands.random_model import write_random_model
from pat_vllm.cli.commands.simulate import run_simulation
from pat_vllm.text_only import without_vision_and_audio

if multiprocessing.parent_process() is not None:
    # The engine of a command: its processes begin by importing the command.
    without_vision_and_audio()

app = typer.Typer(
    name="pat-vllm",
    help="Tensor parallelism that changes during generation.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("random-model")(write_random_model)
app.command("demo")(run_demo)
app.command("doctor")(run_doctor)
app.command("profile")(take_engine_profile)
app.command("simulate")(run_simulation)
app.command("advise")(advise_user)
app.command("plot")(plot_report)


@app.callback()
def main() -> None:
    """Tensor parallelism that changes during generation."""
    # Without a callback, Typer would turn an only command into the program itself.

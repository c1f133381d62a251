"""What the program says about itself."""

from __future__ import annotations

from typing import Any

import typer
from typer.testing import CliRunner

from pat_vllm import __version__
from pat_vllm.cli import app
from pat_vllm.cli.random_model import ARCHS


def test_the_version() -> None:
    outcome = CliRunner().invoke(app, ["--version"])
    assert outcome.exit_code == 0 and outcome.output == f"pat-vllm {__version__}\n"


def test_the_help_names_every_architecture() -> None:
    program: Any = typer.main.get_command(app)
    (arch,) = (one for one in program.commands["random-model"].params if one.name == "arch")
    named = arch.help.replace(";", ",").replace(":", ",").replace(".", ",").split(",")
    assert {*ARCHS} <= {name.strip() for name in named}

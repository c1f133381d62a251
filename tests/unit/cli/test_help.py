"""What the program says about itself."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from pat_vllm import __version__
from pat_vllm.cli.advise import AdviseOptions
from pat_vllm.cli.app import app
from pat_vllm.cli.doctor import DoctorOptions
from pat_vllm.cli.profile import ProfileOptions
from pat_vllm.cli.random_model import RandomModelOptions
from tests.support.command_line import invoke


def test_the_version() -> None:
    outcome = CliRunner().invoke(app, ["--version"])
    assert outcome.exit_code == 0 and outcome.output == f"pat-vllm {__version__}\n"


@pytest.mark.parametrize(
    "command, model",
    [
        ("advise", AdviseOptions),
        ("doctor", DoctorOptions),
        ("profile MODEL", ProfileOptions),
        ("random-model PATH", RandomModelOptions),
    ],
)
def test_help_has_the_ranges_and_errors_name_option_value_and_range(
    command: str, model: type
) -> None:
    _, help_text = invoke(*command.split(), "--help")
    for name, hint in get_type_hints(model, include_extras=True).items():
        (option,) = hint.__metadata__
        if option.min is None:
            continue
        ends = f"{option.min:,} to {option.max:,}"
        assert f"From {ends}." in help_text, name
        flag = f"--{name.replace('_', '-')}"
        odd = float in (hint.__origin__, *get_args(hint.__origin__))
        below, above = option.min - 1, option.max + 1
        for wrong in (float(below), float(above), "nan") if odd else (below, above):
            code, text = invoke(*command.split(), flag, str(wrong))
            assert code == 2 and f"{flag} is {wrong}; allowed is {ends}" in text, text

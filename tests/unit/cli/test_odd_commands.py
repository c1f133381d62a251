"""Whatever a command is given, it says what is wrong or does its work: no traceback, no silence,
and an end."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pat_vllm.cli.app import app
from pat_vllm.models.known_models import MODEL_SHAPES
from tests.support.modelled_profile import modelled_profile

pytestmark = pytest.mark.timeout(300)
EXAMPLES = int(os.environ.get("PAT_TEST_EXAMPLES", "20"))
"""Of each test; `PAT_TEST_EXAMPLES=5000` looks longer."""

SMALL = {"--max-tokens": "32", "--seed": "1"}
BASES: dict[str, dict[str, str]] = {
    "advise": {"--model": "config.json", "--gpu": "H100", "--gpus": "2", **SMALL}
    | {"--responses": "4"},
    "profile": {"": "nowhere"},
    "doctor": {"--ranks": "2"},
    "random-model": {"": "model"},
}
"""A short run of each command, by options; "" is the argument."""
READS = {
    "config.json": (("advise", "--model"),),
    "profile.json": (("advise", "--profile"),),
    "lengths.json": (("advise", "--lengths"),),
}
"""Which commands read a file, by which option."""
ODD = ["", "0", "-1", "1", "nan", "inf", "-inf", "1e999", "9" * 20, "-" + "9" * 400, "9" * 5000]
ODD += ["true", "null", "[]", "{}", "[" * 3000, '{"a":' * 3000, f'{{"layouts": "{"x" * 10**5}"}}']
ODD += ['{"base_tp": true}', f'{{"base_tp": {"9" * 3000}}}', '"\\ud800"', "\x1b[31m", "x" * 300]
ODD += ["pipe", "directory", "zero", "large", "no/such", "~nosuch", "deep.json", "/proc/self/mem"]
VALUES: list[Any] = [None, True, -1, 0, 3, 0.5, 1e308, -math.inf, math.nan, 2**31, 2**53, 10**400]
VALUES += ["", [], "x" * 999, {}, [[[[]]]], {"a": None}, "tp2dp1", "\x1b[31m", "\ud800"]
"""In place of a value of JSON."""
PROGRAM: Any = typer.main.get_command(app)


@functools.cache
def contents() -> dict[str, Any]:
    profile = modelled_profile("llama-3.1-8b", "H100", 2)
    few = profile.model_copy(update={"steps": profile.steps[::7], "switches": profile.switches[:2]})
    return {
        "config.json": dict(MODEL_SHAPES["qwen3-30b-a3b"]),
        "profile.json": few.model_dump(mode="json"),
        "lengths.json": {"lengths": [3, 70, 5], "num_prompt_tokens": [2, 9, 2]},
    }


def write(name: str, content: Any) -> None:
    Path(name).write_text(json.dumps(content))


@pytest.fixture(scope="module", autouse=True)
def somewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """In a folder with such files, where neither engines nor torch start."""
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("work"))
    with pytest.MonkeyPatch.context() as patch:
        os.mkfifo("pipe")
        Path("directory").mkdir()
        Path("zero").symlink_to("/dev/zero")
        Path("large").touch()
        os.truncate("large", 1 << 40)
        Path("deep.json").write_text("[" * 10**5)
        patch.setattr("pat_vllm.cli.profile.take_profile", lambda *_: print("measured"))
        patch.setattr("pat_vllm.doctor.run.examine", lambda *_: ())
        for name in ("torch", "transformers"):
            patch.setitem(sys.modules, name, None)
        yield
    os.chdir(before)


def run(command: str, options: dict[str, str]) -> None:
    """Run a command in this process, and check its end."""
    words = [command]
    for name, value in options.items():
        is_flag = any(name in param.opts and param.is_flag for param in params(command))
        words += [name] if is_flag else [word for word in (name, value) if word or word is value]
    outcome = CliRunner().invoke(app, words)
    ended = outcome.exception is None or isinstance(outcome.exception, SystemExit)
    assert ended and outcome.exit_code in (0, 1, 2) and outcome.output.strip(), words


def params(command: str) -> list[Any]:
    """Options of a command."""
    return [
        param for param in PROGRAM.commands[command].params if param.param_type_name == "option"
    ]


COMMANDS = st.sampled_from([*BASES]).flatmap(
    lambda command: st.tuples(
        st.just(command),
        st.dictionaries(
            st.sampled_from(["", *(param.opts[0] for param in params(command))]),
            st.sampled_from(ODD),
            min_size=1,
            max_size=2,
        ),
    )
)


@given(COMMANDS)
@settings(max_examples=EXAMPLES, deadline=None)
def test_odd_options(given: tuple[str, dict[str, str]]) -> None:
    command, odd = given
    for name, content in contents().items():
        write(name, content)
    takes_argument = "" in BASES[command]
    run(command, {**BASES[command], **{k: v for k, v in odd.items() if k or takes_argument}})


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Paths to all values in a value of JSON."""
    yield ()
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from ((key, *rest) for rest in places(item))


def with_value(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """A value of JSON with another one at a place."""
    if not place:
        return new
    key, *rest = place
    changed = with_value(value[key], tuple(rest), new)
    if isinstance(value, dict):
        return {**value, key: changed}
    return [*value[:key], changed, *value[key + 1 :]]


CHANGES = st.sampled_from([*READS]).flatmap(
    lambda name: st.tuples(
        st.just(name),
        st.sampled_from(READS[name]),
        st.lists(
            st.tuples(st.sampled_from([*places(contents()[name])]), st.sampled_from(VALUES)),
            min_size=1,
            max_size=2,
        ),
    )
)


@given(CHANGES)
@settings(max_examples=EXAMPLES, deadline=None)
def test_odd_files(given: tuple[str, tuple[str, str], list[tuple[tuple[Any, ...], Any]]]) -> None:
    name, (command, option), changes = given
    for file, content in contents().items():
        write(file, content)
    content = contents()[name]
    for place, value in changes:
        if place in places(content):
            content = with_value(content, place, value)
    write(name, content)
    options = {**BASES[command], option: name}
    if option == "--profile":
        options = {
            key: setting
            for key, setting in options.items()
            if key not in ("--model", "--gpu", "--gpus")
        }
    run(command, options)

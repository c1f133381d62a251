"""`benchmarks.gpu.bare`: ranks that share a GPU, on CPU as far as that goes, and its commands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from itertools import chain, groupby, pairwise
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner
from vllm.engine.arg_utils import EngineArgs

from benchmarks.gpu import __main__ as kernels
from benchmarks.gpu.bare import memory, one_gpu, receive, run
from pat_vllm.cli.app import app
from tests.support.child import Child

RANK = "tests.vllm.benchmarks.bare_rank"


def environment() -> dict[str, str]:
    path = os.pathsep.join(map(str, (run.HERE / "start", run.ROOT)))
    return {**os.environ, "PAT_ONE_GPU": "2", "PYTHONPATH": path}


def test_collectives_of_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    """In processes of their own, which `sitecustomize` changes; they check what they get."""
    ranks = [
        Child(
            [sys.executable, "-m", RANK, str(rank), f"file://{tmp_path}/rendezvous"],
            tmp_path / f"{rank}.log",
            cwd=run.ROOT,
            env=environment(),
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.wait() == 0, rank.tail()
    finally:
        for rank in ranks:
            rank.kill()


def test_without_the_variable_nothing_is_changed(tmp_path: Path) -> None:
    program = "import os, torch; print(torch.accelerator.device_count())"
    variables = environment()
    for ranks, count in (("3", "3"), ("", "0")):
        variables["PAT_ONE_GPU"] = ranks
        answer = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True
        )
        assert (answer.stdout.strip(), answer.returncode) == (count, 0), answer.stderr


class Parsed(Exception):
    """A program has taken its arguments, and would begin."""


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[str]], None]:
    """Has the program of a step take its arguments, and no more."""

    def begin(*args: object, **options: object) -> None:
        raise Parsed

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "scale_of", begin)
    monkeypatch.setattr("vllm.LLM", begin)
    monkeypatch.setattr("pat_vllm.doctor.run.examine", begin)
    engine_options = {field.name for field in fields(EngineArgs)}

    def parse_step(step: str, arguments: list[str]) -> None:
        (command,) = run.commands(step, arguments, tmp_path, 2)
        if step == "tests":
            listed = [sys.executable, *command[1:], "--collect-only", "-q"]
            result = subprocess.run(listed, cwd=run.ROOT, capture_output=True)
            assert result.returncode == 0, (command, result.stdout)
            return
        for option, value in pairwise(command):
            if option == "--engine":
                assert json.loads(value).keys() <= engine_options
        if command[0] == "pat-vllm":
            outcome = CliRunner().invoke(app, command[1:])
            assert isinstance(outcome.exception, Parsed), (command, outcome.output)
            return
        module = command[2]
        assert importlib.util.find_spec(module) is not None
        if step != "smoke":
            main = {"kernels": kernels.main, "memory": memory.main}[step]
            with pytest.raises(Parsed):
                main(command[3:])

    return parse_step


def test_programs_of_the_steps_take_their_arguments(
    parse: Callable[[str, list[str]], None], tmp_path: Path
) -> None:
    for step in ("smoke", "kernels", "two", "twographs"):
        parse(step, [])
    parse("kernels", ["--quick"])
    parse("memory", ["qwen3-8b", "--engine", "{}"])
    assert set(run.ONE_GPU) == {"two", "twographs", "tests", "memory"}
    assert one_gpu.RANKS == 1


Call = tuple[list[str], str]
"""What is carried, and a command line."""


def calls() -> dict[int, Call]:
    """Of the README, by their numbers."""
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.+?) \|", (run.HERE / "README.md").read_text(), re.M)
    return {int(n): (re.findall("`(.+?)`", carry), line.strip("`")) for n, carry, line in rows}


def test_calls_of_the_readme_are_in_order() -> None:
    """Each piece travels by itself, with the sums of its part, to where it is received."""
    assert [*calls()] == [*range(11)]
    for carried, line in calls().values():
        assert len(line) <= 2000 and len(carried) in (0, 2), line
        received = re.findall(r"bare\.receive ?(\w*)", line)
        folders = {Path(path).parent for path in carried}
        of_part = {receive.FOLDERS[part or "vllm"].relative_to(run.ROOT) for part in received}
        assert folders == of_part, line
        assert {Path(path).name for path in carried} <= {"SUMS", "piece.00", "piece.01", "piece.02"}


@pytest.mark.parametrize("number", calls())
def test_a_call_of_the_readme_is_parsed(
    number: int, parse: Callable[[str, list[str]], None]
) -> None:
    words = shlex.split(calls()[number][1])
    for several, simple in groupby(words, lambda word: word in ("&&", ";") or word.endswith(";")):
        command = [*simple]
        while command and re.fullmatch("(RANKS|FLASHINFER)=[0-9]", command[0]):
            command.pop(0)
        if several or command[:2] != ["python3", "-m"]:
            continue
        module, *arguments = command[2:]
        assert importlib.util.find_spec(module) is not None, module
        if module == run.__name__:
            for step, *given in chain(*run.steps_of(arguments)):
                parse(step, given)
        else:
            assert (module, arguments in ([], ["flashinfer"])) == (receive.__name__, True)

"""`benchmarks.gpu.bare`: ranks that share a GPU, on CPU as far as that goes, and its commands."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from benchmarks.gpu import __main__ as kernels
from benchmarks.gpu.bare import one_gpu, run
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


def test_programs_of_the_steps_take_their_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*args: object) -> None:
        raise Parsed

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "scale_of", begin)
    for arguments in ([], ["--quick"]):
        (program,) = run.commands("kernels", arguments, tmp_path, 2)
        assert program[:3] == ["python", "-m", "benchmarks.gpu"]
        with pytest.raises(Parsed):
            kernels.main(program[3:])
    (smoke,) = run.commands("smoke", [], tmp_path, 2)
    assert importlib.util.find_spec(smoke[2]) is not None
    (tests,) = run.commands("tests", ["--collect-only", "-q"], tmp_path, 2)
    result = subprocess.run([sys.executable, *tests[1:]], cwd=run.ROOT, capture_output=True)
    assert result.returncode == 0 and b"test_drafts_across_switches" in result.stdout
    known = {field.name for field in fields(EngineArgs)}
    for step in ("two", "twographs"):
        ((*_, options),) = [
            [word for word in command if word.startswith("{")]
            for command in run.commands(step, [], tmp_path, 2)
        ]
        assert json.loads(options).keys() <= known
    assert {"two", "twographs", "tests"} == set(run.ONE_GPU)
    assert one_gpu.RANKS == 1

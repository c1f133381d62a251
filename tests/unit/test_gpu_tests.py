"""`make test-gpu` has tests to run, and its commands take their options."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pat_vllm.doctor.report import Report
from pat_vllm.doctor.request import Request
from tests.support.command_line import invoke

ROOT = Path(__file__).parents[2]


def test_the_doctor_takes_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (arguments,) = re.findall(r"pat-vllm doctor (.*)", (ROOT / "Makefile").read_text())
    given: list[Request] = []

    def examined(console: Console, request: Request, output: Path | None) -> Report:
        given.append(request)
        return Report("", "", fit=True)

    monkeypatch.setattr("pat_vllm.cli.doctor.examined", examined)
    monkeypatch.chdir(tmp_path)
    command = ["doctor", *shlex.split(arguments.replace("$(GPUS)", "2"))]
    code, text = invoke(*command)
    assert code == 0, text
    assert (given[0].shape, given[0].ranks) == ("large", 2)
    assert given[0].engine["speculative_config"]["method"] == "ngram_gpu"
    assert "enforce_eager" not in given[0].engine


def test_the_makefile_selects_tests() -> None:
    (arguments,) = re.findall(r"-m pytest (-m gpu .*)", (ROOT / "Makefile").read_text())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    listed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert listed.stdout.count("::test_") >= 5, listed.stdout

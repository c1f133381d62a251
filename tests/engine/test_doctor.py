"""`pat-vllm doctor` with real engines on a healthy machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pat_vllm.cli import app
from pat_vllm.doctor.values import Verdict
from tests.support.fork_server import Program


def doctor(folder: Path, *options: str) -> tuple[Verdict, str]:
    """The verdict that it wrote, and what it printed."""
    outcome = CliRunner().invoke(app, ["doctor", "--output-dir", str(folder), *options])
    assert (folder / "doctor.json").exists(), outcome.output
    verdict = Verdict.from_json((folder / "doctor.json").read_text())
    assert outcome.exit_code == (1 if verdict.failed else 0), outcome.output
    return verdict, outcome.output


@pytest.fixture
def from_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start sooner than for users."""
    started_by = SimpleNamespace(Popen=Program, STDOUT=None)
    monkeypatch.setattr("pat_vllm.doctor.child.subprocess", started_by)


def test_a_healthy_machine(from_server: None, tmp_path: Path) -> None:
    verdict, text = doctor(tmp_path, "--speculate", "4")
    assert verdict.failed is None, text
    by_name = {stage.name: stage for stage in verdict.stages}
    assert by_name["eager"].status == "passed"
    assert {name for name, one in by_name.items() if one.status == "skipped"} == {
        *("model", "memory", "piecewise", "full", "figures")
    }
    found = {check.name: check.found for check in by_name["eager"].checks}
    assert [*found] == [
        "stock vLLM",
        "stock vLLM new weights",
        "start",
        "layout tp1dp2",
        "layout tp2dp1",
        "tp1dp2 -> tp2dp1 with requests in flight",
        "tp2dp1 -> tp1dp2 with requests in flight",
        "draft length changes with requests in flight",
        "sleep and wake-up",
        "weight update",
        "shutdown",
    ]
    assert "6 in flight, 6 migrated" in found["tp1dp2 -> tp2dp1 with requests in flight"]
    assert " 0 of " not in found["draft length changes with requests in flight"]
    assert "576 tokens" in found["layout tp1dp2"]
    written = (tmp_path / "doctor.json").read_text()
    assert os.getcwd() not in written and str(tmp_path) not in written

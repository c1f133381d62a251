"""`pat-vllm doctor` with real engines on a healthy machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from pat_vllm.cli.app import app
from pat_vllm.doctor.report import REPORT, Report
from tests.support.fork_server import Program


def doctor(folder: Path, *options: str) -> tuple[Report, str]:
    """The report that it wrote, and what it printed."""
    outcome = CliRunner().invoke(app, ["doctor", "--output-dir", str(folder), *options])
    assert (folder / "doctor.json").exists(), outcome.output
    report = REPORT.validate_json((folder / "doctor.json").read_text())
    assert outcome.exit_code == (1 if report.failed else 0), outcome.output
    return report, outcome.output


@pytest.fixture
def from_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start sooner than for users."""
    started_by = SimpleNamespace(Popen=Program, STDOUT=None)
    monkeypatch.setattr("pat_vllm.doctor.child.subprocess", started_by)


def test_a_healthy_machine(from_server: None, tmp_path: Path) -> None:
    # A policy that needs no profile: the nightly tests take one.
    policy = {"kind": "schedule", "switch_at": {"24": 2}}
    options = ("--speculate", "4", "--pat", json.dumps({"policy": policy}))
    report, text = doctor(tmp_path, "--all", *options)
    assert report.failed is None, text
    by_name = {stage.name: stage for stage in report.stages}
    assert by_name["eager"].status == "passed"
    assert {name for name, stage in by_name.items() if stage.status == "skipped"} == {
        *("model", "memory", "piecewise", "full")
    }
    start = ["stock vLLM", "stock vLLM new weights", "start"]
    in_layouts = [
        "layout tp1dp2",
        "layout tp2dp1",
        "tp1dp2 -> tp2dp1 with requests in flight",
        "tp2dp1 -> tp1dp2 with requests in flight",
        "draft length changes with requests in flight",
    ]
    eager = {check.name: check.found for check in by_name["eager"].checks}
    assert [*eager] == [*start, *in_layouts, "sleep and wake-up", "weight update", "shutdown"]
    # On a busy machine some have ended before a switch, or it comes before they begin.
    switches = [eager[name] for name in in_layouts[2:4]]
    assert any(re.match(r"([1-6]) in flight, \1 migrated", line) for line in switches), switches
    assert " 0 of " not in eager["draft length changes with requests in flight"]
    assert "576 tokens" in eager["layout tp1dp2"]
    as_used = {check.name: check.found for check in by_name["as used"].checks}
    updates = ["sleep at level 2, weight update", "weight update by IPC"]
    by_policy = "layouts as the policy chooses"
    assert [*as_used] == [*start, by_policy, *in_layouts, *updates, "shutdown"]
    assert as_used[by_policy].startswith("it went to tp2dp1; ")
    assert "24 prompts of 10 to 2400 tokens" in as_used["start"]
    assert "pat.weights='inplace'" in as_used["start"] and "pat.policy" not in as_used["start"]
    assert re.match(r"[1-9]\d? in flight", as_used[in_layouts[2]])
    # Of 24 requests, 48 tokens as generated and as a prompt's, in each of two layouts.
    assert all(f"{24 * 48 * 2 * 2} tokens" in as_used[update] for update in updates)
    assert "shared host memory" in as_used["weight update by IPC"]
    written = (tmp_path / "doctor.json").read_text()
    assert os.getcwd() not in written and str(tmp_path) not in written

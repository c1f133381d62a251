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
from pat_vllm.predictor.draft_schedule import ngram_config
from tests.support.fork_server import Program


def doctor(folder: Path, *options: str) -> tuple[Report, str]:
    """The report that it wrote, and what it printed."""
    outcome = CliRunner().invoke(app, ["doctor", "--output-dir", str(folder), *options])
    assert (folder / "doctor.json").exists(), outcome.output
    report = REPORT.validate_json((folder / "doctor.json").read_text())
    assert outcome.exit_code == (not report.fit), outcome.output
    return report, outcome.output


@pytest.fixture
def from_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start sooner than for users."""
    started_by = SimpleNamespace(Popen=Program, STDOUT=None)
    monkeypatch.setattr("pat_vllm.doctor.child.subprocess", started_by)


def test_a_healthy_machine(from_server: None, tmp_path: Path) -> None:
    # A policy that needs no profile: the nightly tests take one.
    pat = {"policy": {"kind": "schedule", "switch_at": {"24": 2}}}
    engine = {"speculative_config": ngram_config(4)}
    report, text = doctor(
        tmp_path, "--pat", json.dumps(pat), "--engine", json.dumps(engine), "--eager"
    )
    assert report.fit, text
    found = {check.name: check.found for check in report.checks}
    assert [*found] == [
        *("versions", "host", "random models", "options", "stock vLLM", "stock vLLM, new weights"),
        *("start", "layouts as the policy chooses", "layout tp1dp2", "layout tp2dp1"),
        "tp1dp2 -> tp2dp1 with requests in flight",
        "tp2dp1 -> tp1dp2 with requests in flight",
        "draft length changes with requests in flight",
        *("sleep and wake-up", "weight update", "shutdown"),
    ]
    assert "24 prompts of 10 to 2400 tokens" in found["random models"]
    assert '"switch_at": {"24": 2}' in found["options"] and "CPU_ATTN" in found["start"]
    assert found["layouts as the policy chooses"].startswith("it went to tp2dp1; ")
    across = found["tp1dp2 -> tp2dp1 with requests in flight"]
    assert re.match(r"[1-9]\d? in flight, [1-9]\d? migrated", across), across
    drafts = found["draft length changes with requests in flight"]
    assert re.match(r"k = 4(, \d)*: [1-9]\d* of [1-9]\d* accepted", drafts), drafts
    # Of 24 requests, 48 tokens as generated and as a prompt's, in each of two layouts.
    assert f"{24 * 48 * 2} tokens" in found["layout tp1dp2"]
    assert f"{24 * 48 * 2 * 2} tokens" in found["weight update"]
    written = (tmp_path / "doctor.json").read_text()
    assert os.getcwd() not in written and str(tmp_path) not in written

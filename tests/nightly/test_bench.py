"""The benchmark's engines started as for users, and its workloads with speculation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.bench.__main__ import app
from benchmarks.bench.speculative import models
from benchmarks.bench.speculative.engines import sides_of
from benchmarks.bench.speculative.models import REPEATING, SCATTERED
from benchmarks.bench.speculative.report import markdown
from benchmarks.bench.speculative.workloads import ACCEPTED, SPECULATIVE
from pat_vllm.layout import Layout
from tests.engine.test_bench import as_for_users, assert_bench_runs, fork_from_server

LAYOUTS = (Layout(1, 2), Layout(2, 1))
TINY = dict(arch="qwen3", hidden=128, heads=8, kv_heads=4, repeat=1.5, phrase=16)


def test_bench_with_engines_started_as_for_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_bench_runs(tmp_path, monkeypatch)


def test_workloads_with_speculation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny models, whose weights are replaced on the way."""
    fork_from_server(monkeypatch)
    as_for_users(monkeypatch)
    monkeypatch.setattr("benchmarks.bench.speculative.engines._SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(models, "SPECS", dict.fromkeys(models.SPECS, TINY))
    # So few tokens tell little of what is accepted.
    anything = dict.fromkeys(ACCEPTED, (0.0, 1.0))
    monkeypatch.setattr("benchmarks.bench.speculative.measure.ACCEPTED", anything)
    arguments = ["--workloads", "changing", "--scale", "tiny", "--repeats", "2"]
    arguments += ["--models-dir", str(tmp_path / "models"), "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*-bench-speculation.json")
    assert str(tmp_path) not in path.read_text()
    content = json.loads(path.read_text())
    assert path.with_suffix(".md").read_text() == markdown(content)
    (workload,) = content["workloads"]
    assert len(workload["runs"]) == 3 * len(sides_of(LAYOUTS))
    assert {*workload["tables"]} == {"tp1dp2", "tp2dp1"}
    traces = [SPECULATIVE["changing"].trace(repeat, 0.125) for repeat in range(3)]
    accepted = dict.fromkeys((REPEATING, SCATTERED), 0)
    for run in workload["runs"]:
        assert run["tokens"] == sum(traces[run["repeat"]].lengths)
        assert run["model"] == (SCATTERED if run["repeat"] == 2 else REPEATING)
        assert not run["drafted"] or "k = 0" not in run["side"]
        accepted[run["model"]] += run["accepted"]
    # Weights did change: what follows a scattered token cannot be guessed.
    assert accepted[SCATTERED] < 10 < accepted[REPEATING]

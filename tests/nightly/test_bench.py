"""The benchmark's engines, started as for users."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from benchmarks.bench.__main__ import main
from benchmarks.bench.runs import PAT
from benchmarks.bench.workloads import WORKLOADS
from benchmarks.engine_process import EngineProcess
from tests.support.engines import engine_processes
from tests.support.models import random_model

GONE_WITHIN = 150.0
"""Seconds until the processes of engines that were closed are gone."""


def as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the settings that other tests need."""
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("drafts", [0, 1])
def test_bench(drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small workload, with engines started as for users, and a consistent file."""
    before = engine_processes()
    as_for_users(monkeypatch)
    groups: list[int] = []

    class Recorded(EngineProcess):
        def __init__(self, *options: object) -> None:
            super().__init__(*options)  # type: ignore[arg-type]
            assert self._process.pid is not None
            groups.append(self._process.pid)

    monkeypatch.setattr("benchmarks.bench.engines.EngineProcess", Recorded)
    # In place of the one that is trained.
    monkeypatch.setattr("benchmarks.bench.__main__.model_with_mtp", lambda: random_model("mimo"))
    model = str(random_model("qwen3"))
    arguments = ["--model", model, "--drafts", str(drafts), "--scale", "0.125", "--repeats", "1"]
    main([*arguments, "--workloads", "staggered", "--output-dir", str(tmp_path)])
    sides = 2 * (1 + drafts) + 1
    assert len(groups) == sides
    for group in groups:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
    _, alive = psutil.wait_procs(engine_processes(before), timeout=GONE_WITHIN)
    assert not alive
    (path,) = tmp_path.glob("*-bench.json")
    assert str(tmp_path) not in path.read_text()
    runs = json.loads(path.read_text())["measured"]["runs"]
    traces = [WORKLOADS["staggered"].trace(repeat, 0.125) for repeat in (0, 1)]
    assert len(runs) == 2 * sides
    for run in runs:
        assert run["tokens"] == sum(traces[run["repeat"]].lengths)
        assert run["seconds"] > max(traces[run["repeat"]].arrivals)
    # The batch that warms up is in no figure but the last.
    seconds = {run["side"]: run["seconds"] for run in runs if run["repeat"] == 1}
    best = min((side for side in seconds if side != PAT), key=seconds.__getitem__)
    page = path.with_suffix(".md").read_text()
    assert f"{seconds[best]:.2f} ({seconds[best]:.2f}-{seconds[best]:.2f}) *" in page
    assert f"**{seconds[PAT] / seconds[best]:.2f} (" in page

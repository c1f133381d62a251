"""The demo with real engines."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.fork_server import Program
from tests.support.models import random_model
from tests.unit.cli.test_demo import demo_command


def test_demo_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes start sooner than for users."""
    started_by = SimpleNamespace(Popen=Program, STDOUT=None)
    monkeypatch.setattr("pat_vllm.doctor.child.subprocess", started_by)
    check_demo("qwen3", (), tmp_path, monkeypatch)


def check_demo(
    model: str, options: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs agree, and the live switch goes through the layouts."""
    # As a user has it, rather than as conftest.py sets it: a core for each rank.
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    batch = ("--requests", "10", "--max-tokens", "60", "--switch-at", "3", "--rounds", "2")
    code, text, image = demo_command(folder, random_model(model), *batch, *options)
    assert code == 0, text
    assert "Outputs of all runs agree" in text
    for number in (1, 2):
        assert re.search(rf"round {number} of 2: replicas .* s, one group .* s, live switch", text)
    entered = ["tp2dp1ep", "tp2dp1"] if model == "qwen3_moe" else ["tp2dp1"]
    for source, target in pairwise(["tp1dp2", *entered]):
        assert f"switch {source} -> {target}" in text
    shares = [int(percent) for percent in re.findall(r"' (\d+)% of \d+", text)]
    assert len(shares) == (3 if "--speculate" in options else 0)
    assert all(20 < share < 90 for share in shares), text
    content = image.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000

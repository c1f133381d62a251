"""`benchmarks.gpu` on the CPU: tiny shapes through all of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import engines, reshard
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.shapes import TINY, scale_of
from benchmarks.gpu.timing import Stopwatch
from benchmarks.record import ROOT

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = main(["--device", "cpu", "--quick", "--out", str(tmp_path_factory.mktemp("results"))])
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_every_part_is_measured_for_every_shape(results: dict[str, Any]) -> None:
    assert results["ceiling"]["copy_bytes_per_second"] > 0
    (reshards,), (moves,) = results["reshard"]["tables"], results["kv"]["tables"]
    assert {(r["source"], r["target"]) for r in reshards} == {*permutations((1, 2, 4, 8), 2)}
    assert {r["what"] for r in moves} == {"pack", "unpack"}


def test_bytes_are_those_counted_by_hand(results: dict[str, Any]) -> None:
    stopwatch, weights = Stopwatch(CPU, 1), reshard._Weights(TINY, CPU)
    there, _ = reshard._measure_walk(stopwatch, weights, 0, (1, 2, 1), 1.0)
    # Rank 0 of two keeps its gate rows and half of q, k, v: up comes to gate, k to q, v to k.
    # Each of these ranges is read and written, and so is what it trades places with.
    up, k = TINY.intermediate // 2, TINY.kv_heads // 2 * TINY.head_dim
    rows = 2 * (up + k) + 2 * k
    assert 1e9 * there["GB moved"] == pytest.approx(2 * TINY.layers * rows * TINY.hidden * 2)

    token = 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 2
    (moves,) = results["kv"]["tables"]
    pack = next(row for row in moves if (row["requests"], row["tokens"]) == (3, 64))
    assert 1e9 * pack["GB moved"] == pytest.approx(2 * 3 * 64 * token)


def test_the_makefile_measures_engines_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    (arguments,) = re.findall(r"-m benchmarks\.gpu (.*)", makefile)
    asked: list[Any] = []
    measured = {"about": "Engines.", "tables": [[{"layout": "tp2dp1", "requests": 1, "ms": 1.25}]]}

    def measure(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return measured

    monkeypatch.setattr(engines, "measure", measure)
    words = arguments.replace("$(GPUS)", "2").split()
    path = main([*words, "--device", "cpu", "--parts", "kv", "--out", str(tmp_path)])
    assert asked == [(2, "large", True)]
    page = path.with_suffix(".md").read_text()
    assert "| tp2dp1 | 1 | 1.25 |" in page


def test_measuring_needs_neither_vllm_nor_pydantic() -> None:
    code = (
        "import sys, benchmarks.gpu.__main__\n"
        "assert not {'vllm', 'pydantic', 'typer', 'psutil', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_wrong_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch, scale = Stopwatch(CPU, 2), scale_of(CPU, quick=True)
    prepare = reshard.prepare
    monkeypatch.setattr(reshard, "prepare", lambda rounds: prepare([]))
    with pytest.raises(AssertionError, match="the shard of qkv is wrong"):
        reshard.measure(stopwatch, scale, 1.0)

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
MS = [f"{whose}{which}ms" for whose in ("", "stock_") for which in ("", "low_", "high_")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = main(["--device", "cpu", "--quick", "--out", str(tmp_path_factory.mktemp("results"))])
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_every_part_is_measured_for_every_shape(results: dict[str, Any]) -> None:
    assert results["ceiling"]["copy_bytes_per_second"] > 0
    ways = {(r["source"], r["target"]) for r in results["reshard"]["rows"]}
    assert ways == {*permutations((1, 2, 4, 8), 2)}
    assert {r["what"] for r in results["kv"]["rows"]} == {"pack", "unpack"}


def test_bytes_are_those_counted_by_hand(results: dict[str, Any]) -> None:
    reshard = next(r for r in results["reshard"]["rows"] if (r["walk"], r["rank"]) == ("1-2-1", 0))
    # Rank 0 of two keeps its gate rows and half of q, k, v: up comes to gate, k to q, v to k.
    # Each of these ranges is read and written, and so is what it trades places with.
    up, k = TINY.intermediate // 2, TINY.kv_heads // 2 * TINY.head_dim
    rows = 2 * (up + k) + 2 * k
    assert reshard["bytes_read_and_written"] == 2 * TINY.layers * rows * TINY.hidden * 2

    token = 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 2
    pack = next(r for r in results["kv"]["rows"] if (r["requests"], r["tokens"]) == (3, 64))
    assert pack["bytes_read_and_written"] == 2 * 3 * 64 * token


def test_the_makefile_measures_engines_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    (arguments,) = re.findall(r"-m benchmarks\.gpu (.*)", makefile)
    asked: list[Any] = []
    steps = {"layout": "tp2dp1", "requests": 1, "ratio": 1.0, **dict.fromkeys(MS, 1.0)}
    sizes = dict.fromkeys(("weights", "held", "memory", "stock_memory"), 1 << 20)
    measured = {
        **{"shape": "large", "memory_of": "of a process", "steps": [steps]},
        "memory": [{"layout": "tp2dp1", "stock_weights": None, **sizes}],
    }

    def measure(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return measured

    monkeypatch.setattr(engines, "measure", measure)
    words = arguments.replace("$(GPUS)", "2").split()
    path = main([*words, "--device", "cpu", "--parts", "kv", "--out", str(tmp_path)])
    assert asked == [(2, "large", True)]
    page = path.with_suffix(".md").read_text()
    assert "| tp2dp1 | one alone | 1.000 (1.000-1.000) |" in page
    assert "| tp2dp1 | 1.0 | packed | 1.0 | 1.0 | 1.0 |" in page


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

"""`benchmarks.gpu` on the CPU: tiny shapes through all of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import engines
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.timing import TINY
from benchmarks.record import ROOT


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = main(["--device", "cpu", "--quick", "--out", str(tmp_path_factory.mktemp("results"))])
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_every_part_is_measured_for_every_shape(results: dict[str, Any]) -> None:
    assert results["copies"]["copy_bytes_per_second"] > 0
    (moves,) = results["kv"]["tables"]
    assert {r["what"] for r in moves} == {"pack", "unpack"}


def test_bytes_are_those_counted_by_hand(results: dict[str, Any]) -> None:
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
    path = main([*words, "--device", "cpu", "--out", str(tmp_path)])
    assert asked == [(2, "large", True)]
    page = path.with_suffix(".md").read_text()
    assert "| tp2dp1 | 1 | 1.25 |" in page


def test_measuring_needs_neither_vllm_nor_pydantic() -> None:
    code = (
        "import sys, benchmarks.gpu.__main__\n"
        "assert not {'vllm', 'pydantic', 'typer', 'psutil', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

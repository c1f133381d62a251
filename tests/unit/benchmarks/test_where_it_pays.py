"""The map of where it pays, with a tiny workload."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.where_it_pays import AGENTS, TAILS, cells_of, drawn
from benchmarks.where_it_pays import app as where_it_pays

PNG = b"\x89PNG"


def test_where_it_pays(tmp_path: Path) -> None:
    options = "--gpu A40 --model llama-3.1-8b --tail alike --per-gpu 4 --max-tokens 64"
    arguments = f"{options} --iterations 2 --output-dir {tmp_path}".split()
    done = CliRunner().invoke(where_it_pays, arguments)
    assert done.exit_code == 0, done.output
    (cell,) = json.loads((tmp_path / "where-it-pays.json").read_text())
    assert not cell["answer"]["pays"]
    assert (tmp_path / "where-it-pays.png").read_bytes().startswith(PNG)


def test_rows_of_agents_change_nothing_that_is_drawn_for_others() -> None:
    before, after = (
        drawn(cells_of(["A40", "H100"], ["qwen3-14b"], tails, [4, 64], 16384, 4), 0.5, 1 / 3, 0)
        for tails in (TAILS, (*TAILS, AGENTS))
    )
    assert after[: len(before)] == before and sum(row.acceptance > 0 for row in before) == 7
    agents = after[len(before) :]
    assert {(row.gpu, row.tail, 8 * row.per_gpu) for row in agents} == {
        ("A40", AGENTS, 256),
        ("H100", AGENTS, 256),
    }

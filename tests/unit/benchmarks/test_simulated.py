"""Benchmarks that only simulate: each once with a tiny workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.simulated import elimination
from benchmarks.simulated.elimination import Elimination, Scenario
from benchmarks.simulated.processes import Processes
from benchmarks.where_it_pays import AGENTS, TAILS, cells_of, drawn
from benchmarks.where_it_pays import app as where_it_pays
from pat_vllm.predictor.step_time import StepTimeModel

PROFILES = Path(__file__).parents[3] / "benchmarks" / "profiles"
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
    assert after[: len(before)] == before and sum(one.acceptance > 0 for one in before) == 7
    agents = after[len(before) :]
    assert {(one.gpu, one.tail, 8 * one.per_gpu) for one in agents} == {
        ("A40", AGENTS, 256),
        ("H100", AGENTS, 256),
    }


def test_parts_of_the_predictor_can_be_left_out() -> None:
    scenario = Scenario("8 x A40, kernels", "uniform", 0)
    whole = elimination.profiled(scenario.engine)
    assert {s.repeats for s in whole.steps} == {5}, "measured with its noise"
    for name, part in elimination.PARTS.items():
        with part():
            learned = [fit.learned for fit in StepTimeModel.fit(whole).fits.values()]
        if name.endswith("residual"):
            assert all(learned) if name.startswith("choice") else not any(learned)
    measured = [str(path) for path in PROFILES.glob("*.json")]
    assert elimination.held_out(measured, 1).count("%") == len(measured) * 9


def test_elimination(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheapest part goes first; parts that stand in for each other do not both go."""
    costs = {"cheap": 0.004, "dear": 0.02}

    def seconds(_: Scenario, without: frozenset[str]) -> float:
        lost = sum(costs.get(part, 0) for part in without)
        return 100 * (1 + lost + 0.05 * ({"a", "b"} <= without))

    monkeypatch.setattr(elimination, "PARTS", dict.fromkeys((*costs, "a", "b")))
    monkeypatch.setattr(elimination, "seconds", seconds)
    scenarios = [Scenario("8 x H100", "uniform", seed) for seed in (0, 1)]
    with Processes(1) as pool:
        path = [*Elimination(scenarios, pool).path(lambda _: None)]
    assert path[0][:2] == ("", True)
    assert {part: dropped for part, dropped, _ in path[1:]} == {
        "a": True, "b": False, "cheap": True, "dear": False,
    }  # fmt: skip

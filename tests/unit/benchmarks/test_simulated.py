"""Benchmarks that only simulate: each once with a tiny workload."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.simulated import drafts, elimination, mixture, paper
from benchmarks.simulated.__main__ import app
from benchmarks.simulated.elimination import Elimination, Scenario
from benchmarks.simulated.replay import Processes, Setting
from benchmarks.where_it_pays import AGENTS, TAILS, cells_of, drawn
from benchmarks.where_it_pays import app as where_it_pays
from pat_vllm.predictor.step_time import StepTimeModel

PROFILES = Path(__file__).parents[3] / "benchmarks" / "profiles"
PNG = b"\x89PNG"


def test_paper() -> None:
    setting = next(one for one, (generation, _) in paper.SETTINGS.items() if generation)
    result = paper.run(replace(setting, requests=4), 2)
    # Switches of the paper's cost are no choice of the clairvoyant's.
    choices = zip(result.clairvoyant, result.ours, *result.static.values(), strict=True)
    assert all(best <= min(others) for best, *others in choices)
    cells = paper.row(setting, result)
    assert "-34.6%" in cells and "1.37x" in cells


@pytest.mark.parametrize("processes", [1, 2])
def test_one_setting_by_the_command_line(processes: int) -> None:
    options = "paper --gpu H100 --ranks 2 --requests 4 --max-tokens 64 --workload uniform --seeds 1"
    done = CliRunner().invoke(app, [*options.split(), "--processes", str(processes)])
    assert done.exit_code == 0, done.output
    assert "MODELLED" in done.output and done.output.count("llama-3.1-8b, 2 x H100") == 2


def test_drafts() -> None:
    setting = Setting("A40", requests=8, max_tokens=128, acceptance=0.5)
    result = drafts.run(setting, 1)
    sides = (result.plain, result.fixed, result.tuned, result.pat_plain, result.pat)
    assert result.clairvoyant <= min(sides)
    # Half of all drafts are accepted.
    assert result.pat < result.pat_plain and result.fixed < result.plain
    assert "median" in drafts.closing([(setting, result)])


def test_mixture() -> None:
    setting = Setting("H200", "qwen3-30b-a3b", 32, 64, workload="grpo")
    sides = mixture.run(setting, 1)
    ours = [(side.name, side.layout[:3]) for side in sides if side.name != "static"]
    assert len(sides) == 14 and {base for _, base in ours} == {"tp1", "tp2", "tp4"}
    assert len(mixture.row(setting, sides)) == len(mixture.comparison(1).headers)


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
    assert len(measured) == 2
    assert elimination.held_out(measured, 1).count("%") == 2 * 9


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

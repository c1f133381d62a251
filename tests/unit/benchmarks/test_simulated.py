"""Benchmarks that only simulate: each once with a tiny workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import elimination, mixture
from benchmarks.elimination import Elimination, Scenario
from benchmarks.layouts_and_drafts import app as layouts_and_drafts
from benchmarks.paper.__main__ import app as paper
from benchmarks.paper.policy import SETTINGS
from benchmarks.paper.tables import simulate_settings
from benchmarks.where_it_pays import app as where_it_pays
from pat_vllm.predictor.step_time import StepTimeModel

PROFILES = Path(__file__).parents[3] / "benchmarks" / "profiles"
PNG = b"\x89PNG"
SIDES = ("plain", "fixed", "dynamic", "pat_plain", "pat")


def run(app: typer.Typer, arguments: str) -> None:
    done = CliRunner().invoke(app, arguments.split())
    assert done.exit_code == 0, done.output


def test_paper_simulate(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("300\n20\n7\n")
    run(
        paper,
        f"simulate --gpu h100 --ranks 2 --iterations 2 --output-dir {tmp_path} --lengths {lengths}",
    )
    content = json.loads((tmp_path / "simulate.json").read_text())
    policies = {row["policy"]: row for row in content["policies"]}
    # Switches of the paper's cost are no choice of the clairvoyant's.
    assert all(row["regret"] >= -1e-9 for name, row in policies.items() if "of 5.52" not in name)
    assert policies["clairvoyant"]["regret"] == 0
    assert (tmp_path / "simulate.png").read_bytes().startswith(PNG)
    assert "MODELLED" in (tmp_path / "simulate.md").read_text()


def test_paper_settings(tmp_path: Path) -> None:
    chosen = next(setting for setting in SETTINGS if setting.generation and setting.ranks <= 8)
    ((_, comparison),) = simulate_settings(
        Console(quiet=True), seeds=1, seed=0, requests=4, settings=[chosen], output_dir=tmp_path
    )
    assert all(len(row.runs) == 1 for row in comparison.results)
    text = (tmp_path / "paper.md").read_text()
    assert "MODELLED" in text and chosen.title in text
    assert (tmp_path / "paper.png").read_bytes().startswith(PNG)


def test_layouts_and_drafts(tmp_path: Path) -> None:
    arguments = "--gpu A40 --requests 8 --max-tokens 128 --seeds 1"
    run(layouts_and_drafts, f"{arguments} --output-dir {tmp_path}")
    (result,) = json.loads((tmp_path / "layouts-and-drafts.json").read_text())
    seconds = result["result"]
    assert seconds["clairvoyant"] <= min(seconds[side] for side in SIDES)
    # Half of all drafts are accepted.
    assert seconds["pat"] < seconds["pat_plain"] and seconds["fixed"] < seconds["plain"]


def test_mixture() -> None:
    setting = mixture.Setting("H200", 0.0, prompts=4, max_tokens=64)
    sides = mixture.run_setting(setting, seeds=1)
    ours = [(side.name, side.layout[:3]) for side in sides if side.name != "static"]
    assert len(sides) == 14 and {base for _, base in ours} == {"tp1", "tp2", "tp4"}
    assert "MODELLED" in mixture.text([(setting, sides)], 1)


def test_where_it_pays(tmp_path: Path) -> None:
    options = "--gpu A40 --model llama-3.1-8b --tail alike --per-gpu 4 --max-tokens 64"
    run(where_it_pays, f"{options} --iterations 2 --output-dir {tmp_path}")
    (cell,) = json.loads((tmp_path / "where-it-pays.json").read_text())
    assert not cell["answer"]["pays"]
    assert (tmp_path / "where-it-pays.png").read_bytes().startswith(PNG)


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
    path = [(part, dropped) for part, dropped, _ in Elimination(scenarios).path(lambda _: None)]
    assert path[0] == ("", True)
    assert dict(path[1:]) == {"a": True, "b": False, "cheap": True, "dear": False}

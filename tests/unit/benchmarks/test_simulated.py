"""Benchmarks that only simulate: each once with a tiny workload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import elimination
from benchmarks.elimination import Elimination, Scenario
from benchmarks.layouts_and_drafts import app as layouts_and_drafts
from benchmarks.paper.__main__ import app as paper
from benchmarks.paper.policy import SETTINGS
from benchmarks.paper.tables import simulate_settings
from benchmarks.where_it_pays import app as where_it_pays
from pat_vllm.layout import Layout

PNG = b"\x89PNG"
SIDES = ("plain", "fixed", "dynamic", "pat_plain", "pat")


def run(app: typer.Typer, arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": "200", "TERM": "dumb"})
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


def test_paper_simulate(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("300\n20\n7\n")
    arguments = f"simulate --gpu h100 --ranks 2 --iterations 2 --output-dir {tmp_path}"
    code, text = run(paper, f"{arguments} --lengths {lengths}")
    assert code == 0, text
    assert run(paper, "simulate --gpu abacus")[0] == 2
    assert "MODELLED" in text and "3 requests" in text
    content = json.loads((tmp_path / "simulate.json").read_text())
    assert content["modelled"] is True
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
    content = json.loads((tmp_path / "paper.json").read_text())
    assert content["settings"][0]["setting"]["title"] == chosen.title
    text = (tmp_path / "paper.md").read_text()
    assert "MODELLED" in text and chosen.title in text
    assert (tmp_path / "paper.png").read_bytes().startswith(PNG)


def test_layouts_and_drafts(tmp_path: Path) -> None:
    picture = tmp_path / "batch.png"
    arguments = "--gpu A40 --requests 8 --max-tokens 128 --seeds 1"
    code, text = run(layouts_and_drafts, f"{arguments} --output-dir {tmp_path} --plot {picture}")
    assert code == 0, text
    assert picture.read_bytes().startswith(PNG)
    assert "MODELLED" in (tmp_path / "layouts-and-drafts.md").read_text()
    (result,) = json.loads((tmp_path / "layouts-and-drafts.json").read_text())
    seconds = result["result"]
    assert seconds["clairvoyant"] <= min(seconds[side] for side in SIDES)
    # Half of all drafts are accepted.
    assert seconds["pat"] < seconds["pat_plain"] and seconds["fixed"] < seconds["plain"]


def test_mixture() -> None:
    from benchmarks.mixture import Setting, run_setting, text

    setting = Setting("H200", 0.0, prompts=4, max_tokens=64)
    sides = run_setting(setting, seeds=1)
    assert [side.name for side in sides].count("static") == 7
    ours = [(side.name, side.layout[:3]) for side in sides if side.name != "static"]
    assert ours[:3] == [("cut", "tp1"), ("spread", "tp1"), ("both", "tp1")]
    assert {base for _, base in ours} == {"tp1", "tp2", "tp4"} and len(ours) == 7
    written = text([(setting, sides)], 1)
    assert "MODELLED" in written and "8 x H200 | grpo | 0" in written


def test_where_it_pays(tmp_path: Path) -> None:
    options = "--gpu A40 --model llama-3.1-8b --tail alike --tail straggler --per-gpu 4"
    code, text = run(
        where_it_pays, f"{options} --max-tokens 64 --iterations 2 --output-dir {tmp_path}"
    )
    assert code == 0, text
    written = (tmp_path / "where-it-pays.md").read_text()
    assert "MODELLED" in written and "| 8 x A40 | llama-3.1-8b | straggler | 4 |" in written
    cells = json.loads((tmp_path / "where-it-pays.json").read_text())
    assert [each["cell"]["tail"] for each in cells] == ["alike", "straggler"]
    assert not cells[0]["answer"]["pays"]
    assert (tmp_path / "where-it-pays.png").read_bytes().startswith(PNG)


# ---------------------------------------------------------------- backward elimination

SCENARIOS = [
    *(Scenario("8 x H100", workload, seed) for workload in ("uniform", "GRPO") for seed in (0, 1)),
    Scenario("8 x H100", "uniform", 0, (Layout(1, 8), 2.0)),
]
COSTS = {"idle": -0.001, "cheap": 0.004, "dear": 0.02}


@pytest.mark.parametrize(
    ("lost", "parts", "expected"),
    [
        pytest.param(
            lambda s, without: sum(COSTS[part] for part in without),
            COSTS,
            [("idle", True), ("cheap", True), ("dear", False)],
            id="cheapest first",
        ),
        pytest.param(
            lambda s, without: 0.05 * (len(without) == 2),
            ("a", "b"),
            [("a", True), ("b", False)],
            id="parts that stand in for each other do not both go",
        ),
        pytest.param(
            lambda s, without: (
                0.03 * ("a" in without and s.workload == "GRPO")
                + 0.06 * ("b" in without and s.wrong is not None)
            ),
            ("a", "b"),
            [("b", False), ("a", False)],
            id="a workload or a wrong profile is enough to stay",
        ),
    ],
)
def test_elimination(
    monkeypatch: pytest.MonkeyPatch, lost: Any, parts: Any, expected: list[tuple[str, bool]]
) -> None:
    monkeypatch.setattr(elimination, "PARTS", dict.fromkeys(parts))
    monkeypatch.setattr(elimination, "seconds", lambda s, without: 100 * (1 + lost(s, without)))
    path = Elimination(SCENARIOS).path(lambda text: None)
    assert [(part, dropped) for part, dropped, _ in path] == [("", True), *expected]


def test_scenario_of_elimination_is_replayed_alike() -> None:
    """Parts that were left out are back afterwards."""
    scenario = Scenario("pat_vllm/simulator/modelled/measured.json", "shift", 0)
    whole = elimination.seconds(scenario, frozenset())
    without = elimination.seconds(scenario, frozenset(elimination.PARTS))
    assert without != whole and without == pytest.approx(whole, rel=0.5)
    assert whole == elimination.seconds(scenario, frozenset())

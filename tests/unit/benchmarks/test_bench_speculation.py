"""The benchmark's workloads with speculation: tables, and gains of invented runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.bench.run import BenchSettings
from benchmarks.bench.runs import PAT, Run
from benchmarks.bench.speculative.engines import (
    PAT_PLAIN,
    TABLE,
    SpeculativeRun,
    sides_of,
    static_name,
)
from benchmarks.bench.speculative.measure import Measured
from benchmarks.bench.speculative.models import REPEATING
from benchmarks.bench.speculative.report import markdown, workload_content
from benchmarks.bench.speculative.tuning import Drafted, together, tuned_table
from benchmarks.bench.speculative.workloads import SPECULATIVE
from pat_vllm.cli.results import to_json
from pat_vllm.layout import Layout
from pat_vllm.reporting import DraftSample
from pat_vllm.simulator.modelled.hardware import measured_noise

LAYOUTS = ONE, TWO = Layout(1, 2), Layout(2, 1)
FACTS = {
    **dict(date="2026-01-02T03:04:05", command="python -m benchmarks.bench", commit="abc"),
    **dict(cpu="a CPU", cores=2, memory_gib=8.0, vllm="0.32.0", torch="2.0"),
}


def test_table_has_the_best_length_for_each_batch() -> None:
    def seconds(layout: Layout, batch: Any, *_: Any, drafts: Any = 0, k: int = 0, **__: Any) -> Any:
        """Sixteen tokens cost no more than one does."""
        return np.maximum(16, batch + drafts) / layout.tp + 1e-6 * (k > 0)

    # Steps of a request that verified 4 drafts each.
    samples = [DraftSample(0.0, ONE, 0, 4, 1, 4, accepted) for accepted in (2, 1, 2, 1)]
    four = Drafted.of(4, 10, samples)
    assert (four.steps, four.share, together([four, four])[4].steps) == (4, 6 / 16, 8)
    gave = [Drafted(0, 100, 0, 0), Drafted(1, 100, 66, 34), four]
    model: Any = SimpleNamespace(seconds=seconds)
    table = tuned_table(model, TWO, 64, 50.0, gave)
    assert [first for first, _, _ in table] == [1, *(last + 1 for _, last, _ in table[:-1])]
    of = {batch: k for first, last, k in table for batch in range(first, last + 1)}
    assert {*of} == {*range(1, 65)}
    for batch, k in of.items():
        per_token = {
            each.length: seconds(
                TWO, batch, drafts=batch * each.drafted / each.steps, k=each.length
            )
            * (each.steps / each.tokens)
            for each in gave
        }
        assert per_token[k] == min(per_token.values())
    assert (of[1], of[64]) == (4, 0), (
        "while drafts are free, and when they cost more than they give"
    )


def settings_of(name: str) -> BenchSettings:
    return BenchSettings(Path(), 2, (SPECULATIVE[name],), repeats=3, scale="full", seed=0)


PACE = {
    static_name(ONE, 0): 1.0,
    static_name(TWO, 0): 1.1,
    static_name(ONE, 4): 0.9,
    static_name(TWO, TABLE): 0.8,
    PAT_PLAIN: 0.95,
    PAT: 0.76,
}


def measured_of(name: str, pace: float = 0.76) -> Measured:
    """Invented runs: a side takes as long as `PACE` says, PAT `pace`, in units of the repeat's."""
    workload, paces = SPECULATIVE[name], PACE | {PAT: pace}
    runs = []
    for repeat in range(4):
        for side in sides_of(LAYOUTS):
            k = side.length or 0
            seconds = paces.get(side.name, 1.2) * (1 + repeat)
            runs.append(
                SpeculativeRun(
                    Run(side.name, name, repeat, 100.0, seconds, 500, 0.5 * seconds, True),
                    workload.model(repeat),
                    (DraftSample(100.5, ONE, 0, k, 20, 10 * k, 5 * k),),
                    Drafted(k, 500, 10 * k, 5 * k),
                )
            )
    gave = {model: (Drafted(1, 100, 60, 30),) for model in workload.models}
    tables = {ONE: [(1, 32, 1)], TWO: [(1, 64, 0)]}
    return Measured(workload, tuple(runs), gave, tables, measured_noise(), {PAT: 9.0})


def test_gains_are_in_rows_of_their_own() -> None:
    measured = measured_of("repeating")
    measured.check_accepted()
    few = tuple(dataclasses.replace(run, gave=Drafted(4, 200, 100, 29)) for run in measured.runs)
    with pytest.raises(ValueError, match="were accepted"):
        dataclasses.replace(measured, runs=few).check_accepted()
    workload = workload_content(settings_of("repeating"), measured)
    machine = {"ranks": 2, "repeats": 3, "scale": "full"}
    content = {"machine": FACTS, "settings": machine, "workloads": [workload]}
    bests = [workload[f"best_{kind}"] for kind in ("plain", "fixed", "table")]
    assert bests == ["tp1dp2, k = 0", "tp1dp2, k = 4", "tp2dp1, table"]
    assert {name: ratio["mean"] for name, ratio in workload["ratios"].items()} == pytest.approx(
        {"layout": 0.95, "k": 0.76 / 0.95, "both": 0.76, "fixed": 0.76 / 0.9, "table": 0.95}
    )
    assert workload["accepted"] == {REPEATING: 0.5} and workload["seconds"][PAT]["repeats"] == 3
    text = markdown(content)
    assert text == markdown(json.loads(to_json(content)))
    assert "| layout alone: PAT, k = 0 / best static, k = 0 | 0.95 (0.95-0.95) |" in text
    assert "| k alone: PAT / PAT, k = 0 | 0.80 (0.80-0.80) |" in text


@pytest.mark.parametrize(
    ("name", "pace", "verdicts"),
    [
        ("repeating", 0.75, ["met", "met"]),
        ("repeating", 0.9, ["met", "missed"]),
        ("unpredictable", 0.9, ["met", "met"]),
        ("unpredictable", 0.98, ["missed", "missed"]),
        ("changing", 0.94, ["met"]),
        ("changing", 0.96, ["missed"]),
    ],
)
def test_bars(name: str, pace: float, verdicts: list[str]) -> None:
    workload = workload_content(settings_of(name), measured_of(name, pace))
    assert [bar["verdict"] for bar in workload["bars"]] == verdicts

"""`pat-vllm doctor` with real engines: kinds of failure, a mixture, figures, compiled engines."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.doctor import stages
from pat_vllm.doctor.child import Run, run_module
from tests.engine.test_doctor import doctor, from_server
from tests.gpuless.compiled import LITE
from tests.support.doctor_sabotage import VARIABLE

__all__ = ["from_server"]

EXTENSION = json.dumps({"worker_extension_cls": "tests.support.doctor_sabotage.Sabotage"})


def test_a_mixture(from_server: None, tmp_path: Path) -> None:
    """Both kinds of layouts are tested and measured."""
    verdict, text = doctor(tmp_path, "--shape", "moe", "--figures")
    assert verdict.failed is None, text
    by_name = {stage.name: stage for stage in verdict.stages}
    checks = {name: [check.name for check in one.checks] for name, one in by_name.items()}
    for source, target in permutations(("tp1dp2", "tp2dp1", "tp2dp1ep"), 2):
        assert f"{source} -> {target} with requests in flight" in checks["eager"]
    assert {"decode step tp2dp1ep", "memory tp2dp1ep"} <= {*checks["figures"]}, checks["figures"]


_kept: dict[str, Run] = {}


@pytest.fixture
def stock_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock vLLM, which is not sabotaged, answers once for all tests."""

    def run(module: str, request: str, environment: Any, *others: Any) -> Run:
        if not module.endswith("session") or json.loads(request)["references"]:
            return run_module(module, request, environment, *others)
        if "stock" not in _kept:
            honest = {k: v for k, v in environment.items() if k != VARIABLE}
            _kept["stock"] = run_module(module, request, honest, *others)
        return _kept["stock"]

    monkeypatch.setattr(stages, "run_module", run)


@pytest.mark.parametrize(
    ("sabotage", "check", "problem"),
    [
        ("rows", "layout tp2dp1", "wrong token"),
        ("dies", "tp1dp2 -> tp2dp1 with requests in flight", "rank 1 died"),
    ],
)
def test_what_is_wrong_is_found_where_it_is(
    sabotage: str,
    check: str,
    problem: str,
    stock_once: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Started as for users: what a server's processes write does not come to the log."""
    monkeypatch.setenv(VARIABLE, sabotage)
    # The engine's processes do not import from the current directory.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    verdict, text = doctor(tmp_path, "--engine", EXTENSION)
    assert verdict.failed is not None and verdict.failed.name == "eager", text
    last = verdict.failed.checks[-1]
    assert last.name == check and check in text
    assert problem in (last.problem or ""), text
    assert "Not fit: stage 'eager' failed" in " ".join(text.split())


def test_figures(from_server: None, stock_once: None, tmp_path: Path) -> None:
    verdict, text = doctor(tmp_path, "--figures")
    assert verdict.failed is None, text
    checks = {check.name: check for check in verdict.stages[-1].checks}
    assert [*checks] == [
        *("copies", "rows of weights", "KV"),
        *("stock vLLM tp=1", "stock vLLM tp=2", "PAT"),
        *("decode step tp1dp2", "decode step tp2dp1", "memory tp1dp2", "memory tp2dp1"),
    ]
    for layout in ("tp1dp2", "tp2dp1"):
        steps = checks[f"decode step {layout}"].values
        assert [*steps] == ["1", "8"] and all(one["ratio"] > 0 for one in steps.values())
        memory = checks[f"memory {layout}"].values
        # A layout sees what stock vLLM has at its tp; all layouts together hold the base layout's.
        assert memory["weights"] <= memory["held"]
        assert memory["stock_weights"] in (None, memory["weights"])  # packed, on most CPUs
    held = checks["memory tp2dp1"].values["held"]
    assert held == pytest.approx(checks["memory tp1dp2"].values["weights"], rel=0.05)


@pytest.fixture
def graphs_on_cpu(stock_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CPU had CUDA graphs: the stages are run, and vLLM compiles as on CUDA."""
    run = stages.run_module  # of `stock_once`

    def with_graphs(module: str, *others: Any) -> Run:
        ended = run(module, *others)
        if not module.endswith("environment") or ended.answer is None:
            return ended
        facts = json.loads(ended.answer) | {"graphs": {}}
        return replace(ended, answer=json.dumps(facts))

    monkeypatch.setattr(stages, "run_module", with_graphs)
    path = os.pathsep.join([str(COMPILED_ON_CPU), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")


COMPILED_ON_CPU = Path(__file__).parents[1] / "support" / "compiled_on_cpu"
COMPILATION = {"mode": 3, "backend": "inductor", "inductor_compile_config": LITE}


def test_compiled_engines_through_the_stages(graphs_on_cpu: None, tmp_path: Path) -> None:
    """The extension is another, so that no graphs are looked for: a CPU has none."""
    engine = json.loads(EXTENSION) | {"compilation_config": COMPILATION}
    verdict, text = doctor(tmp_path, "--all", "--engine", json.dumps(engine))
    assert verdict.failed is None, text
    by_name = {stage.name: stage for stage in verdict.stages}
    for name in ("piecewise", "full"):
        assert by_name[name].status == "passed"
        assert "layout tp2dp1" in {check.name for check in by_name[name].checks}

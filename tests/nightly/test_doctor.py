"""`pat-vllm doctor` with real engines: kinds of failure, a mixture, compiled engines."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.doctor import stages
from pat_vllm.doctor.child import ChildResult, run_module
from tests.engine.test_doctor import doctor, from_server
from tests.gpuless.compiled import LITE
from tests.support.doctor_sabotage import VARIABLE

__all__ = ["from_server"]

EXTENSION = json.dumps({"worker_extension_cls": "tests.support.doctor_sabotage.Sabotage"})


@pytest.mark.parametrize("shape", ["moe", "linear", "latent"])
def test_a_mixture(from_server: None, shape: str, tmp_path: Path) -> None:
    """Both kinds of layouts are tested, also of models with other kinds of attention."""
    report, text = doctor(tmp_path, "--shape", shape)
    assert report.failed is None, text
    by_name = {stage.name: stage for stage in report.stages}
    checks = {name: [check.name for check in stage.checks] for name, stage in by_name.items()}
    for source, target in permutations(("tp1dp2", "tp2dp1"), 2):
        assert f"{source} -> {target} with requests in flight" in checks["eager"]


_kept: dict[str, ChildResult] = {}
"""By what stock vLLM was asked."""


@pytest.fixture
def stock_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock vLLM, which is not sabotaged and is eager, answers the same once for all tests."""

    def run(module: str, request: str, variables: Any, told: Any, *others: Any) -> ChildResult:
        task = json.loads(request)
        if not module.endswith("engine") or task["references"]:
            return run_module(module, request, variables, told, *others)
        if (asked := json.dumps(task["prompts"])) not in _kept:
            honest = {k: v for k, v in variables.items() if k != VARIABLE}
            task["engine"].pop("compilation_config", None)
            task["engine"]["enforce_eager"] = True
            _kept[asked] = run_module(module, json.dumps(task), honest, told, *others)
        return _kept[asked]

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
    report, text = doctor(tmp_path, "--engine", EXTENSION)
    assert report.failed is not None and report.failed.name == "eager", text
    last = report.failed.checks[-1]
    assert last.name == check and check in text
    assert problem in (last.problem or ""), text
    assert "Not fit: stage 'eager' failed" in " ".join(text.split())


@pytest.fixture
def graphs_on_cpu(stock_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a CPU had CUDA graphs: the stages are run, and vLLM compiles as on CUDA."""
    run = stages.run_module  # of `stock_once`

    def with_graphs(module: str, request: str, *others: Any) -> ChildResult:
        if module.endswith("engine"):  # whose workers have none to count
            request = json.dumps(json.loads(request) | {"graphs": False})
        ended = run(module, request, *others)
        if not module.endswith("environment") or ended.answer is None:
            return ended
        return replace(ended, answer=ended.answer | {"graphs": {}})

    monkeypatch.setattr(stages, "run_module", with_graphs)
    path = os.pathsep.join([str(COMPILED_ON_CPU), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")


COMPILED_ON_CPU = Path(__file__).parents[1] / "support" / "compiled_on_cpu"
COMPILATION = {"mode": 3, "backend": "inductor", "inductor_compile_config": LITE}


def test_compiled_engines_through_the_stages(graphs_on_cpu: None, tmp_path: Path) -> None:
    """Compared with stock vLLM that is eager: compiled as on CUDA, it does not start on a CPU."""
    engine = {"compilation_config": COMPILATION}
    report, text = doctor(tmp_path, "--all", "--engine", json.dumps(engine))
    assert report.failed is None, text
    by_name = {stage.name: stage for stage in report.stages}
    for name in ("piecewise", "full"):
        assert by_name[name].status == "passed"
        assert "layout tp2dp1" in {check.name for check in by_name[name].checks}

"""`pat-vllm doctor` with real engines: one healthy run, and each kind of failure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pat_vllm.cli import app
from pat_vllm.doctor import stages
from pat_vllm.doctor.child import Run, run_module
from pat_vllm.doctor.values import Verdict
from tests.gpuless.compiled import LITE
from tests.support.doctor_sabotage import VARIABLE
from tests.support.fork_server import Program

pytestmark = pytest.mark.slow

EXTENSION = json.dumps({"worker_extension_cls": "tests.support.doctor_sabotage.Sabotage"})


def doctor(folder: Path, *options: str) -> tuple[Verdict, str]:
    outcome = CliRunner().invoke(app, ["doctor", "--output-dir", str(folder), *options])
    assert (folder / "doctor.json").exists(), outcome.output
    verdict = Verdict.from_json((folder / "doctor.json").read_text())
    assert outcome.exit_code == (1 if verdict.failed else 0), outcome.output
    return verdict, outcome.output


@pytest.fixture
def from_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start sooner than for users."""
    started_by = SimpleNamespace(Popen=Program, STDOUT=None)
    monkeypatch.setattr("pat_vllm.doctor.child.subprocess", started_by)


def test_a_healthy_machine(from_server: None, tmp_path: Path) -> None:
    verdict, text = doctor(tmp_path, "--speculate", "4")
    assert verdict.failed is None, text
    by_name = {stage.name: stage for stage in verdict.stages}
    assert by_name["eager"].status == "passed"
    assert {name for name, one in by_name.items() if one.status == "skipped"} == {
        *("model", "memory", "piecewise", "full", "figures")
    }
    found = {check.name: check.found for check in by_name["eager"].checks}
    assert [*found] == [
        "stock vLLM",
        "stock vLLM new weights",
        "start",
        "layout tp1dp2",
        "layout tp2dp1",
        "tp1dp2 -> tp2dp1 with requests in flight",
        "tp2dp1 -> tp1dp2 with requests in flight",
        "draft length changes with requests in flight",
        "sleep and wake-up",
        "weight update",
        "shutdown",
    ]
    assert "6 in flight, 6 migrated" in found["tp1dp2 -> tp2dp1 with requests in flight"]
    assert " 0 of " not in found["draft length changes with requests in flight"]
    assert "576 tokens" in found["layout tp1dp2"]
    written = (tmp_path / "doctor.json").read_text()
    assert os.getcwd() not in written and str(tmp_path) not in written


@pytest.mark.nightly
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
def stock_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stock vLLM, which is not sabotaged, answers once for all tests."""

    def run(module: str, request: str, environment: Any, *others: Any) -> Run:
        if not module.endswith("session") or json.loads(request)["references"]:
            return run_module(module, request, environment, *others)
        if "stock" not in _kept:
            honest = {k: v for k, v in environment.items() if k != VARIABLE}
            _kept["stock"] = run_module(module, request, honest, *others)
        return _kept["stock"]

    monkeypatch.setattr(stages, "run_module", run)
    yield


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sabotage", "check", "problem"),
    [
        ("rows", "layout tp2dp1", "wrong token"),
        ("logprob", "layout tp1dp2", "wrong log-probability"),
    ],
)
def test_a_mistake_is_found_where_it_is(
    sabotage: str,
    check: str,
    problem: str,
    from_server: None,
    stock_once: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found_by(sabotage, check, problem, tmp_path, monkeypatch)


@pytest.mark.nightly
def test_a_rank_that_dies(
    stock_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started as for users: what a server's processes write does not come to the log."""
    check = "tp1dp2 -> tp2dp1 with requests in flight"
    found_by("dies", check, "rank 1 died", tmp_path, monkeypatch)


def found_by(
    sabotage: str, check: str, problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor, with a sabotaged engine, names the problem in this check."""
    monkeypatch.setenv(VARIABLE, sabotage)
    verdict, text = doctor(folder, "--engine", EXTENSION)
    assert verdict.failed is not None and verdict.failed.name == "eager", text
    last = verdict.failed.checks[-1]
    assert last.name == check, text
    assert problem in (last.problem or ""), text
    assert last.name in text and "Not fit: stage 'eager' failed" in " ".join(text.split())


@pytest.mark.nightly
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


COMPILED_ON_CPU = Path(__file__).parent / "support" / "compiled_on_cpu"
COMPILATION = {"mode": 3, "backend": "inductor", "inductor_compile_config": LITE}


@pytest.mark.nightly
def test_a_stage_whose_graphs_were_not_captured(graphs_on_cpu: None, tmp_path: Path) -> None:
    verdict, text = doctor(
        tmp_path, "--all", "--engine", json.dumps({"compilation_config": COMPILATION})
    )
    assert verdict.failed is not None and verdict.failed.name == "piecewise", text
    (start,) = verdict.failed.checks
    assert start.name == "start" and "no CUDA graphs were captured" in (start.problem or "")
    assert [stage.why for stage in verdict.stages[-2:]] == ["'piecewise' failed"] * 2


@pytest.mark.nightly
def test_compiled_engines_through_the_stages(graphs_on_cpu: None, tmp_path: Path) -> None:
    """The extension is another, so that no graphs are looked for: a CPU has none."""
    engine = json.loads(EXTENSION) | {"compilation_config": COMPILATION}
    verdict, text = doctor(tmp_path, "--all", "--engine", json.dumps(engine))
    assert verdict.failed is None, text
    by_name = {stage.name: stage for stage in verdict.stages}
    for name in ("piecewise", "full"):
        assert by_name[name].status == "passed"
        assert "layout tp2dp1" in {check.name for check in by_name[name].checks}


@pytest.mark.nightly
def test_a_torchvision_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip puts it beside a CPU torch: transformers finds it, and cannot import it."""
    package, info = tmp_path / "torchvision", tmp_path / "torchvision-0.0.dist-info"
    package.mkdir()
    info.mkdir()
    why = "operator torchvision::nms does not exist"
    (package / "__init__.py").write_text(f"raise RuntimeError({why!r})")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.0\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    verdict, text = doctor(tmp_path / "out")
    assert verdict.failed is not None and verdict.failed.name == "environment", text
    (check,) = verdict.failed.checks
    assert check.name == "torchvision" and why in (check.problem or "")
    assert "pip uninstall torchvision" in (check.problem or "")


@pytest.mark.nightly
def test_too_little_memory(tmp_path: Path) -> None:
    verdict, text = doctor(tmp_path, "--engine", json.dumps({"kv_cache_memory_bytes": 1 << 16}))
    assert verdict.failed is not None and verdict.failed.name == "eager", text
    assert "too little memory" in verdict.failed.why
    assert any("for the cache blocks" in line for line in verdict.failed.log)


def test_a_model_that_is_refused(from_server: None, tmp_path: Path) -> None:
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "sliding_window": 128,
    }
    model = tmp_path / "config.json"
    model.write_text(json.dumps(config))
    verdict, text = doctor(tmp_path / "out", "--model", str(model), "--gpu", "H100")
    assert verdict.failed is not None and verdict.failed.name == "model", text
    assert "sliding_window=128" in verdict.failed.why

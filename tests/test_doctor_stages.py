"""The stages of `pat-vllm doctor`, without their processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pat_vllm.doctor import stages
from pat_vllm.doctor.arithmetic import gpu_named
from pat_vllm.doctor.child import Run
from pat_vllm.doctor.environment import FACTS, Device, Facts, environment_checks
from pat_vllm.doctor.in_workers import EXTENSION
from pat_vllm.doctor.plan import Models, Plan
from pat_vllm.doctor.session import REFERENCES, SESSION, captured
from pat_vllm.doctor.stages import run_stages
from pat_vllm.doctor.steps import MEASURED, STEPS, Measured, StepTime
from pat_vllm.doctor.values import Check, Stage
from tests.support.mutation import mutated
from tests.test_doctor import LLAMA_70B, REFERENCE

GPU = Device("H100", "9.0", 80 << 30, 79 << 30)
ON_CPU = Facts(
    {"vllm": "0.32.0"},
    "cpu",
    {"kind": "a CPU", "cores": 2, "numa_nodes": 1},
    24 << 30,
    20 << 30,
    graphs={"piecewise": "NONE", "full": "NONE"},
)
ON_GPUS = dataclasses.replace(
    ON_CPU,
    platform="cuda",
    graphs={"piecewise": "PIECEWISE", "full": "FULL"},
    devices=(GPU, GPU),
    peers=((True, True), (True, True)),
    attention="FLASH_ATTN",
    runner="V2",
    config=LLAMA_70B,
)


def problems(facts: Facts, ranks: int = 2, machine: bool = True) -> dict[str, str]:
    checks = environment_checks(facts, ranks, machine)
    return {one.name: one.problem for one in checks if one.problem is not None}


def test_the_environment() -> None:
    assert not problems(ON_CPU) and not problems(ON_GPUS)
    poor = dataclasses.replace(ON_CPU, free=1 << 30)
    assert "too little memory: 2 ranks on CPU need about" in problems(poor)["host memory"]
    assert "--ranks 4 needs as many GPUs, 2 are here" in problems(ON_GPUS, ranks=4)["GPUs"]
    assert not problems(ON_GPUS, ranks=4, machine=False)
    apart = dataclasses.replace(ON_GPUS, peers=((True, False), (False, True)))
    links = next(one for one in environment_checks(apart, 2, True) if one.name == "links")
    assert links.problem is None and "no peer access between 0-1" in links.found
    assert links.values["peer_access"] == [[1, 0], [0, 1]]
    busy = dataclasses.replace(ON_GPUS, devices=(GPU, dataclasses.replace(GPU, free=9 << 30)))
    gpus = next(one for one in environment_checks(busy, 2, True) if one.name == "GPUs")
    assert "GPU 1: 9.0 GiB free" in gpus.found


class Children:
    """In the place of `run_module`: answers that a process would give."""

    def __init__(self, facts: Facts, ends: dict[int, str] | None = None) -> None:
        self.facts = facts
        self.ends = ends or {}
        """Of the n-th session, what is wrong."""
        self.sessions: list[Any] = []
        self.modules: list[str] = []
        self.environments: list[Any] = []
        self.timed: list[Any] = []
        self.wrong_module = ""

    def __call__(self, module: str, request: str, environment: Any, *_: Any) -> Run:
        self.modules.append(module.rpartition(".")[2])
        self.environments.append(environment)
        if self.modules[-1] == self.wrong_module:
            return Run(None, "the log", (Check("copies", problem="torch copies wrongly"),))
        if module.endswith("environment"):
            return Run(FACTS.dump_json(self.facts).decode(), "", ())
        if module.endswith("device"):
            return Run(None, "", (Check("copies", "9 GB/s"),))
        if module.endswith("steps"):
            self.timed.append(STEPS.validate_json(request))
            return Run(MEASURED.dump_json(timed(self.timed[-1].engine)).decode(), "", ())
        session = SESSION.validate_json(request)
        self.sessions.append(session)
        problem = self.ends.get(len(self.sessions))
        if problem is not None:
            return Run(None, "the log\nits end", (Check("start", problem=problem),))
        made = None if session.references else REFERENCES.dump_json((REFERENCE,) * 2).decode()
        return Run(made, "", (Check("start"),))


def timed(engine: dict[str, Any]) -> Measured:
    """Steps of PAT are a tenth slower than stock vLLM's in this."""
    names = ["tp1dp2", "tp2dp1"] if engine["distributed_executor_backend"] == "pat" else ["stock"]
    tp = engine["tensor_parallel_size"]
    slow = 1.1 if len(names) == 2 else 1.0
    steps = [
        StepTime(name, requests, slow * requests * ms, 1.0, 99.0)
        for name, ms in zip(names, (2.0, 3.0) if len(names) == 2 else (1.0 + tp,), strict=True)
        for requests in (1, 8)
    ]
    weights = {name: 1 << 20 for name in names}
    facts = {"weights": weights, "held": 2 << 20, "memory": int(slow * (512 << 20))}
    return Measured(tuple(steps), (facts,) * tp)


def run_with(
    monkeypatch: pytest.MonkeyPatch, children: Children, **options: Any
) -> dict[str, Stage]:
    monkeypatch.setattr(stages, "run_module", children)
    plan: dict[str, Any] = dict(
        ranks=2,
        pat={"base_tp": 1},
        engine={"worker_extension_cls": "x.Y", "block_size": 32},
        model=None,
        gpu=None,
        machine=True,
        dtype=None,
        all=False,
        figures=False,
        environment=lambda ranks, may_compile: {"ranks": ranks, "compiles": may_compile},
    )
    models = Models(Path("first"), Path("other"), 512, (4, 0, 1))
    found = run_stages(Plan(**{**plan, **options}), lambda: models, lambda what: None)
    return {stage.name: stage for stage in found}


def status_of(found: dict[str, Stage]) -> list[str]:
    return [stage.status[0] for stage in found.values()]


def test_by_default_only_eager_engines_run(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    found = run_with(monkeypatch, children)
    assert status_of(found) == ["p", "s", "s", "p", "s", "s", "s"]
    assert found["figures"].why == "only with --all or --figures"
    stock, pat = children.sessions
    assert "worker_extension_cls" not in stock.engine and stock.engine["block_size"] == 32
    assert "distributed_executor_backend" not in stock.engine
    assert pat.engine["additional_config"]["pat"] == {
        "base_tp": 1,
        "policy": {"kind": "static", "tp": 1},
        "weights": "inplace",
        "kv_transfer": "migrate",
    }
    assert pat.engine["dtype"] == "float32" and pat.engine["enforce_eager"] is True
    assert pat.engine["speculative_config"]["num_speculative_tokens"] == 4
    assert pat.references == (REFERENCE, REFERENCE)


def test_all_stages_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_GPUS)
    found = run_with(monkeypatch, children, all=True)
    assert status_of(found) == ["p", "s", "s", "p", "p", "p", "p"]
    modes = [one.engine.get("compilation_config") for one in children.sessions]
    assert modes == [None, None, {"cudagraph_mode": "PIECEWISE"}, {"cudagraph_mode": "FULL"}]
    assert "enforce_eager" not in children.sessions[-1].engine
    assert children.sessions[-1].engine["dtype"] == "bfloat16"
    assert children.sessions[-1].engine["enable_sleep_mode"] is True
    # The stages that capture also compile.
    assert [one["compiles"] for one in children.environments[1:5]] == [False, False, True, True]


def test_graphs_must_have_been_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_GPUS)
    run_with(monkeypatch, children, all=True, engine={})
    assert [one.graphs for one in children.sessions] == [False, False, True, True]
    assert children.sessions[-1].engine["worker_extension_cls"] == EXTENSION
    # A user's own extension cannot tell.
    children = Children(ON_GPUS)
    run_with(monkeypatch, children, all=True)
    assert not any(one.graphs for one in children.sessions)
    check_captured()
    with mutated(captured, {"if not min(counts)": "if not max(counts)"}):
        with pytest.raises(AssertionError):
            check_captured()


def check_captured() -> None:
    def told(*counts: int) -> str:
        facts = [{"graphs": count, "cudagraph_mode": "FULL"} for count in counts]
        llm: Any = SimpleNamespace(collective_rpc=lambda method: facts)
        try:
            return captured(llm)
        except RuntimeError as error:
            return str(error)

    assert told(35, 34) == "cudagraph_mode FULL, 34 graphs a rank"
    assert told(35, 0).startswith("no CUDA graphs were captured: cudagraph_mode FULL")


def test_graphs_are_left_out_where_vllm_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    found = run_with(monkeypatch, children, all=True)
    assert status_of(found)[3:] == ["p", "s", "s", "p"]
    why = "not on this platform: of cudagraph_mode PIECEWISE, vLLM makes NONE on cpu"
    assert found["piecewise"].why == why
    assert not any(one["compiles"] for one in children.environments[1:])


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    found = run_with(monkeypatch, children, figures=True)
    assert status_of(found) == ["p", "s", "s", "p", "s", "s", "p"]
    assert children.modules[3:] == ["device", "steps", "steps", "steps"]
    assert [one["ranks"] for one in children.environments[3:]] == [2, 1, 2, 2]
    assert [one.label for one in children.timed] == ["stock vLLM tp=1", "stock vLLM tp=2", "PAT"]
    stock, _, pat = (one.engine for one in children.timed)
    assert stock["distributed_executor_backend"] == "mp" and "additional_config" not in stock
    assert pat["distributed_executor_backend"] == "pat" and pat["enforce_eager"] is True
    assert {one["worker_extension_cls"] for one in (stock, pat)} == {EXTENSION}
    assert len(children.timed[0].prompts) == 16
    checks = {one.name: one for one in found["figures"].checks}
    assert [*checks] == [
        "copies",
        "decode step tp1dp2",
        "decode step tp2dp1",
        "memory tp1dp2",
        "memory tp2dp1",
    ]
    wide = checks["decode step tp2dp1"]
    assert "1 request alone 3.30 ms, stock 3.00 ms (1.10x)" in wide.found
    assert wide.values["8"]["ratio"] == pytest.approx(1.1)
    assert "a process 563 MiB with all layouts, stock 512 MiB" in checks["memory tp1dp2"].found
    # On GPUs, as vLLM runs by default, or as the user has it.
    children = Children(ON_GPUS)
    run_with(monkeypatch, children, figures=True, engine={"enforce_eager": True})
    assert all(one.engine["enforce_eager"] for one in children.timed)
    children = Children(ON_GPUS)
    run_with(monkeypatch, children, figures=True)
    assert not any("enforce_eager" in one.engine for one in children.timed)
    assert all(one["compiles"] for one in children.environments[3:])


def test_figures_that_are_wrong_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    children.wrong_module = "device"
    failed = run_with(monkeypatch, children, figures=True)["figures"]
    assert failed.status == "failed" and failed.log == ("the log",)
    assert "torch copies wrongly" in failed.why and not children.timed
    children = Children(ON_CPU)
    children.wrong_module = "steps"
    assert run_with(monkeypatch, children, figures=True)["figures"].status == "failed"


def test_it_stops_at_the_first_stage_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_GPUS, {3: "rank 1 died"})
    found = run_with(monkeypatch, children, all=True)
    assert status_of(found) == ["p", "s", "s", "p", "f", "s", "s"]
    assert found["piecewise"].why == "start: rank 1 died"
    assert found["piecewise"].log == ("the log", "its end")
    assert found["full"].why == "'piecewise' failed"
    assert len(children.sessions) == 3


def test_too_little_memory_and_refusals_are_stages_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = dict(ranks=8, gpu=gpu_named("H100"), machine=False, model=Path("m"))
    found = run_with(monkeypatch, Children(ON_GPUS), **options)
    assert status_of(found) == ["p", "p", "f", "s", "s", "s", "s"]
    assert "too little memory" in found["memory"].why
    refused = dataclasses.replace(ON_GPUS, refused="quantization='fp8' (allowed: None)")
    found = run_with(monkeypatch, Children(refused), **options)
    assert status_of(found) == ["p", "f", "s", "s", "s", "s", "s"]
    assert "quantization='fp8'" in found["model"].why
    # Without --model it is the self-test's own engine that is refused: the environment's affair.
    found = run_with(monkeypatch, Children(refused))
    assert status_of(found) == ["f", "s", "s", "s", "s", "s", "s"]

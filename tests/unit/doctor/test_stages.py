"""The stages of `pat-vllm doctor`, without their processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.doctor import stages
from pat_vllm.doctor.child import Run
from pat_vllm.doctor.environment import FACTS, Facts
from pat_vllm.doctor.in_workers import EXTENSION
from pat_vllm.doctor.plan import Models, Plan
from pat_vllm.doctor.session import REFERENCES, SESSION, Session
from pat_vllm.doctor.stages import run_stages
from pat_vllm.doctor.steps import MEASURED, STEPS, Measured, StepTime
from pat_vllm.doctor.values import Check, Stage
from pat_vllm.gpus import GPUS
from tests.unit.doctor.test_compare import REFERENCE
from tests.unit.doctor.test_environment import GPU, ON_CPU, ON_GPUS


class Children:
    """In the place of `run_module`: answers that a process would give.

    Attributes:
        sessions, timed: what engines were asked to do, and to be timed with.
        modules, environments: of all processes.
    """

    def __init__(
        self, facts: Facts, ends: Mapping[int, str] | None = None, wrong: str = ""
    ) -> None:
        """`ends` says what is wrong with the n-th session, `wrong` names a module that fails."""
        self.sessions: list[Any] = []
        self.timed: list[Any] = []
        self.modules: list[str] = []
        self.environments: list[Any] = []
        self._facts, self._ends, self._wrong = facts, ends or {}, wrong

    def __call__(self, module: str, request: str, environment: Any, *_: Any) -> Run:
        self.modules.append(module.rpartition(".")[2])
        self.environments.append(environment)
        match self.modules[-1]:
            case self._wrong:
                return Run(None, "the log", (Check("copies", problem="torch copies wrongly"),))
            case "environment":
                return Run(FACTS.dump_json(self._facts).decode(), "", ())
            case "device":
                return Run(None, "", (Check("copies", "9 GB/s"),))
            case "steps":
                self.timed.append(STEPS.validate_json(request))
                return Run(MEASURED.dump_json(measured(self.timed[-1].engine)).decode(), "", ())
        session = SESSION.validate_json(request)
        self.sessions.append(session)
        problem = self._ends.get(len(self.sessions))
        if problem is not None:
            return Run(None, "the log\nits end", (Check("start", problem=problem),))
        made = None if session.references else REFERENCES.dump_json((REFERENCE,) * 2).decode()
        return Run(made, "", (Check("start"),))


def measured(engine: dict[str, Any]) -> Measured:
    """Steps of PAT are a tenth slower than stock vLLM's in this."""
    tp = engine["tensor_parallel_size"]
    ms, slow = {"stock": 1.0 + tp}, 1.0
    if engine["distributed_executor_backend"] == "pat":
        ms, slow = {"tp1dp2": 2.0, "tp2dp1": 3.0}, 1.1
    steps = [
        StepTime(name, requests, slow * requests * one, 1.0, 99.0)
        for name, one in ms.items()
        for requests in (1, 8)
    ]
    weights = dict.fromkeys(ms, 1 << 20)
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


def status_of(found: dict[str, Stage]) -> str:
    """A letter for each of the eight stages: passed, failed or skipped."""
    return "".join(stage.status[0] for stage in found.values())


def test_by_default_only_eager_engines_run(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    assert status_of(run_with(monkeypatch, children)) == "psspssss"
    stock, pat = children.sessions
    assert "worker_extension_cls" not in stock.engine and stock.engine["block_size"] == 32
    assert "distributed_executor_backend" not in stock.engine
    assert pat.engine["additional_config"]["pat"]["policy"] == {"kind": "static"}
    assert pat.engine["additional_config"]["pat"]["layouts"] == [1, 2]
    assert pat.engine["dtype"] == "float32" and pat.engine["enforce_eager"] is True
    assert pat.engine["speculative_config"]["num_speculative_tokens"] == 4
    assert pat.references == (REFERENCE, REFERENCE)


def test_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    assert status_of(run_with(monkeypatch, children, all=True)) == "psspsspp"
    assert not any(one["compiles"] for one in children.environments[1:])
    children = Children(ON_GPUS)
    assert status_of(run_with(monkeypatch, children, all=True, engine={})) == "pssppppp"
    modes = [one.engine.get("compilation_config") for one in children.sessions]
    graphs = [{"cudagraph_mode": "PIECEWISE"}, {"cudagraph_mode": "FULL"}]
    assert modes == [None, None, *graphs, None, None]
    captures = [False, False, True, True, False, True]
    assert [one.graphs for one in children.sessions] == captures
    # The stages that capture also compile.
    assert [one["compiles"] for one in children.environments[1:5]] == captures[:4]
    last = children.sessions[3].engine
    assert "enforce_eager" not in last and last["enable_sleep_mode"] is True
    assert (last["dtype"], last["worker_extension_cls"]) == ("bfloat16", EXTENSION)


def as_used(
    monkeypatch: pytest.MonkeyPatch, facts: Facts, **options: Any
) -> tuple[Session, Session]:
    """What is asked of stock vLLM and of PAT in the stage of that name."""
    children = Children(facts)
    run_with(monkeypatch, children, all=True, **options)
    stock, pat = children.sessions[-2:]
    assert pat.prompts == stock.prompts and pat.references == (REFERENCE, REFERENCE)
    return stock, pat


def test_as_used_has_the_defaults_of_vllm_and_pat(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, pat = as_used(monkeypatch, ON_GPUS, engine={})
    own = {"enable_sleep_mode", "worker_extension_cls", "speculative_config"}
    executor = {"tensor_parallel_size", "distributed_executor_backend", "additional_config"}
    model = {"model", "dtype", "seed", "skip_tokenizer_init"}
    assert pat.engine.keys() == own | executor | model
    assert pat.engine["additional_config"] == {"pat": {"base_tp": 1}}
    assert pat.engine["speculative_config"]["method"] == "ngram_gpu"
    assert pat.draft_lengths == (4, 0, 1) and pat.sleeps and pat.graphs
    for name in ("enable_sleep_mode=True", "dtype='bfloat16'", "seed=0"):
        assert name in pat.as_used
    assert "pat." not in pat.as_used.replace("pat_vllm.", "")
    lengths = [len(one) for one in pat.prompts]
    assert len(lengths) == 256 and sum(one > 2048 for one in lengths) == 8
    assert max(lengths) + pat.max_tokens < stock.engine["max_model_len"]
    assert stock.engine["max_num_seqs"] == 256 and not stock.as_used


def test_as_used_on_cpu_says_what_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pat = as_used(monkeypatch, ON_CPU, pat={"weights": "materialized", "kv_transfer": "auto"})
    lengths = [len(one) for one in pat.prompts]
    assert len(lengths) == 24 and sum(one > 2048 for one in lengths) == 1
    assert pat.engine["speculative_config"]["method"] == "ngram" and "ngram_gpu" in pat.as_used
    assert pat.engine["block_size"] == 32 and "block_size" not in pat.as_used
    assert f"kv_cache_memory_bytes={256 << 20}, pat.weights='inplace'" in pat.as_used
    assert pat.sleeps and not pat.graphs
    v2 = dataclasses.replace(ON_CPU, runner="V2")
    _, pat = as_used(monkeypatch, v2)
    assert pat.engine["speculative_config"]["method"] == "ngram_gpu"
    assert "ngram" not in pat.as_used.replace("'method': 'ngram_gpu'", "")


def test_as_used_keeps_what_a_user_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: dict[str, Any] = {
        **{"gpu_memory_utilization": 0.5, "max_num_seqs": 64, "max_model_len": 1024},
        **{"enforce_eager": True, "enable_sleep_mode": False, "worker_extension_cls": "x.Y"},
        **{"kv_cache_memory_bytes": 1 << 30, "dtype": "float16", "seed": 7},
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
    }
    policy = {"kind": "predictor", "length_bound": 64, "profile": "p", "lengths_file": "l"}
    given = {"base_tp": 1, "policy": policy, "kv_transfer": "recompute"}
    stock, pat = as_used(monkeypatch, ON_GPUS, engine=engine, pat=given)
    assert {name: pat.engine[name] for name in engine} == engine
    # Files of the user's own model are neither read nor written.
    kept = {"kind": "predictor", "length_bound": 64}
    assert pat.engine["additional_config"]["pat"] == {**given, "policy": kept}
    assert pat.as_used == f"not the user's: pat.policy={kept!r}, skip_tokenizer_init=True"
    assert not (pat.sleeps or pat.graphs or pat.draft_lengths)
    assert max(map(len, pat.prompts)) == 1024 - 48 - 1
    assert (stock.engine["max_model_len"], stock.engine["max_num_seqs"]) == (1024, 64)
    # More than the random model's contexts: also of vLLM's "as much as there is room for".
    for length in (1 << 17, -1):
        _, pat = as_used(monkeypatch, ON_GPUS, engine={"max_model_len": length})
        assert pat.engine["max_model_len"] == 4096 and "max_model_len=4096" in pat.as_used


def test_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    found = run_with(monkeypatch, children, figures=True)
    assert status_of(found) == "psspsssp"
    assert children.modules[3:] == ["device", "steps", "steps", "steps"]
    assert [one["ranks"] for one in children.environments[3:]] == [2, 1, 2, 2]
    stock, _, pat = (one.engine for one in children.timed)
    assert stock["distributed_executor_backend"] == "mp" and "additional_config" not in stock
    assert pat["distributed_executor_backend"] == "pat" and pat["enforce_eager"] is True
    checks = {one.name: one for one in found["figures"].checks}
    layouts = ("tp1dp2", "tp2dp1")
    steps, memory = ([f"{what} {one}" for one in layouts] for what in ("decode step", "memory"))
    assert [*checks] == ["copies", *steps, *memory]
    assert checks["decode step tp2dp1"].values["8"]["ratio"] == pytest.approx(1.1)


def test_it_stops_at_the_first_stage_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_GPUS, {3: "rank 1 died"})
    found = run_with(monkeypatch, children, all=True)
    assert status_of(found) == "psspfsss"
    assert found["piecewise"].why == "start: rank 1 died"
    assert found["piecewise"].log == ("the log", "its end")
    assert found["full"].why == "'piecewise' failed"
    assert len(children.sessions) == 3
    for module in ("device", "steps"):
        children = Children(ON_CPU, wrong=module)
        failed = run_with(monkeypatch, children, figures=True)["figures"]
        assert failed.status == "failed" and not children.timed


def test_too_little_memory_and_refusals_are_stages_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = dict(ranks=8, gpu=GPUS["H100"].device, machine=False, model=Path("m"))
    found = run_with(monkeypatch, Children(ON_GPUS), **options)
    assert status_of(found) == "ppfsssss"
    assert "too little memory" in found["memory"].why
    # Without --gpu, memory is computed for the smallest that is here.
    small = dataclasses.replace(GPU, memory=40 << 30)
    here = dataclasses.replace(ON_GPUS, devices=(GPU, small) * 4)
    found = run_with(monkeypatch, Children(here), ranks=8, model=Path("m"), pat={"base_tp": 4})
    assert "weights take 32.9 GiB of the 36.8 GiB" in found["memory"].why
    refused = dataclasses.replace(ON_GPUS, refused="quantization='fp8' (allowed: None)")
    assert status_of(run_with(monkeypatch, Children(refused), **options)) == "pfssssss"
    # Without --model it is the self-test's own engine that is refused: the environment's affair.
    assert status_of(run_with(monkeypatch, Children(refused))) == "fsssssss"

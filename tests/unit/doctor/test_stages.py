"""The stages of `pat-vllm doctor`, without their processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pat_vllm.doctor import stages
from pat_vllm.doctor.child import ChildResult
from pat_vllm.doctor.doctor_options import Options
from pat_vllm.doctor.engine import REFERENCES, TASK, Task
from pat_vllm.doctor.environment import FACTS, EnvironmentFacts
from pat_vllm.doctor.report import Stage
from pat_vllm.doctor.stages import explain, run_stages
from pat_vllm.doctor.tasks import Models
from pat_vllm.models.known_models import MODEL_SHAPES
from tests.unit.doctor.test_compare import REFERENCE
from tests.unit.doctor.test_environment import GPU, ON_CPU, ON_GPUS


class Children:
    """In the place of `run_module`: what processes would tell.

    Attributes:
        tasks: what engines were asked to do.
        environments: of all processes.
    """

    def __init__(self, facts: EnvironmentFacts, ends: Mapping[int, Any] | None = None) -> None:
        """`ends` has what the n-th engine tells, and how its process ends."""
        self.tasks: list[Task] = []
        self.environments: list[Any] = []
        self._facts, self._ends = facts, ends or {}

    def __call__(
        self, module: str, request: str, variables: Any, on_message: Any, _: float
    ) -> ChildResult:
        self.environments.append(variables)
        if module.endswith("environment"):
            assert json.loads(request)["distributed_executor_backend"] == "pat"
            return ChildResult(0, "", FACTS.dump_python(self._facts, mode="json"))
        self.tasks.append(TASK.validate_json(request))
        on_message({"doing": "start"})
        if (end := self._ends.get(len(self.tasks))) is not None:
            check, ended = end
            on_message(check)
            return ended
        on_message({"check": {"name": "start"}})
        if self.tasks[-1].references:
            return ChildResult(0, "")
        return ChildResult(0, "", REFERENCES.dump_python((REFERENCE,) * 2, mode="json"))


def run_with(
    monkeypatch: pytest.MonkeyPatch, children: Children, **options: Any
) -> dict[str, Stage]:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(stages, "run_module", children)
    own = {"worker_extension_cls": "x.Y", "block_size": 32, "additional_config": {"more": 1}}
    given: dict[str, Any] = {"pat": {"base_tp": 1}, "engine": own, **options}
    models = Models(Path("first"), Path("other"), 512, (4, 0, 1))
    make_models = Mock(return_value=models)
    by_name = {stage.name: stage for stage in run_stages(Options(**given), make_models, Mock())}
    # Only for engines, and in the place of a model that is not given.
    assert make_models.call_count == (bool(children.tasks) or "model" not in options)
    return by_name


def status_of(by_name: dict[str, Stage]) -> str:
    """A letter for each of the seven stages: passed, failed or skipped."""
    return "".join(stage.status[0] for stage in by_name.values())


def test_by_default_only_eager_engines_run(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    assert status_of(run_with(monkeypatch, children)) == "psspsss"
    stock, pat = children.tasks
    assert stock.engine["block_size"] == 32 and stock.engine["additional_config"] == {"more": 1}
    assert not {"worker_extension_cls", "distributed_executor_backend"} & stock.engine.keys()
    additional = pat.engine["additional_config"]
    assert additional["more"] == 1 and additional["pat"]["policy"] == {"kind": "static"}
    assert additional["pat"]["layouts"] == [1, 2]
    assert pat.engine["dtype"] == "float32" and pat.engine["enforce_eager"] is True
    assert pat.engine["speculative_config"]["num_speculative_tokens"] == 4
    assert pat.engine["worker_extension_cls"] == "x.Y"
    assert pat.references == (REFERENCE, REFERENCE) and stock.rounding_tp == 1


def test_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    assert status_of(run_with(monkeypatch, children, all=True)) == "psspssp"
    assert all("TORCHDYNAMO_DISABLE" in environment for environment in children.environments)
    children = Children(ON_GPUS)
    assert status_of(run_with(monkeypatch, children, all=True, engine={})) == "psspppp"
    # What compiles is compared with stock vLLM that compiles.
    modes = [task.engine.get("compilation_config") for task in children.tasks]
    piecewise, full = ({"cudagraph_mode": mode} for mode in ("PIECEWISE", "FULL"))
    assert modes == [None, None, piecewise, piecewise, full, full, None, None]
    eager = [task.engine.get("enforce_eager", False) for task in children.tasks]
    assert eager == [True, True, *[False] * 6]
    assert [task.graphs for task in children.tasks] == [False, False, *[False, True] * 3]
    compiles = ["TORCHDYNAMO_DISABLE" not in environment for environment in children.environments]
    assert compiles == [False, False, False, *[True] * 6]
    # What rounding does is known from an engine as wide as PAT's, but in float32.
    assert [task.rounding_tp for task in children.tasks] == [2, 1] * 4
    last = children.tasks[5].engine
    assert last["enable_sleep_mode"] is True and last["dtype"] == "bfloat16"


def test_stages_that_are_named_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, status, mode in (
        (["full"], "pssssps", {"cudagraph_mode": "FULL"}),
        (["eager", "as used"], "psspssp", None),
        (["environment"], "pssssss", None),
    ):
        children = Children(ON_GPUS)
        by_name = run_with(monkeypatch, children, stage=named, engine={})
        assert status_of(by_name) == status, named
        assert len(children.tasks) == 2 * (status.count("p") - 1)
        assert all(task.engine.get("compilation_config") == mode for task in children.tasks)
        assert by_name["piecewise"].why == "not named by --stage"


def test_stock_vllm_that_has_answered_may_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    message = {"check": {"name": "stock vLLM"}}
    answer = REFERENCES.dump_python((REFERENCE,) * 2, mode="json")
    for result, status in ((answer, "psspsss"), (None, "pssfsss")):
        children = Children(ON_CPU, {1: (message, ChildResult(-6, "", result))})
        assert status_of(run_with(monkeypatch, children)) == status


def as_used(
    monkeypatch: pytest.MonkeyPatch, facts: EnvironmentFacts, **options: Any
) -> tuple[Task, Task]:
    """What is asked of stock vLLM and of PAT in the stage of that name."""
    children = Children(facts)
    run_with(monkeypatch, children, all=True, **options)
    stock, pat = children.tasks[-2:]
    assert pat.prompts == stock.prompts and pat.references == (REFERENCE, REFERENCE)
    return stock, pat


def test_as_used_has_the_defaults_of_vllm_and_pat(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, pat = as_used(monkeypatch, ON_GPUS, engine={})
    own = {"enable_sleep_mode", "speculative_config"}
    executor = {"tensor_parallel_size", "distributed_executor_backend", "additional_config"}
    model = {"model", "dtype", "seed", "skip_tokenizer_init"}
    assert pat.engine.keys() == own | executor | model
    assert pat.engine["additional_config"] == {"pat": {"base_tp": 1}}
    assert pat.engine["speculative_config"]["method"] == "ngram_gpu"
    assert pat.draft_lengths == (4, 0, 1) and pat.sleeps and pat.graphs
    for name in ("enable_sleep_mode=True", "dtype='bfloat16'", "seed=0"):
        assert name in pat.as_used
    assert "pat." not in pat.as_used
    lengths = [len(prompt) for prompt in pat.prompts]
    assert len(lengths) == 256 and sum(length > 2048 for length in lengths) == 8
    assert max(lengths) + 48 < stock.engine["max_model_len"]
    assert stock.engine["max_num_seqs"] == 256 and not stock.as_used
    assert "enforce_eager" not in stock.engine


def test_as_used_on_cpu_says_what_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pat = as_used(monkeypatch, ON_CPU, pat={"weights": "materialized", "kv_transfer": "auto"})
    lengths = [len(prompt) for prompt in pat.prompts]
    assert len(lengths) == 24 and sum(length > 2048 for length in lengths) == 1
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
    policy = {"kind": "predictor", "length_bound": 64, "profile": "p"}
    given = {"base_tp": 1, "state_dir": "s", "policy": policy, "kv_transfer": "recompute"}
    stock, pat = as_used(monkeypatch, ON_GPUS, engine=engine, pat=given)
    assert {name: pat.engine[name] for name in engine} == engine
    # Files of the user's own model are neither read nor written.
    kept = {"kind": "predictor", "length_bound": 64}
    assert pat.engine["additional_config"]["pat"] == {
        **{name: given[name] for name in ("base_tp", "kv_transfer")},
        "policy": kept,
    }
    assert (
        pat.as_used
        == f"not the user's: pat.policy={kept!r}, pat.state_dir=None, skip_tokenizer_init=True"
    )
    assert not (pat.sleeps or pat.graphs or pat.draft_lengths)
    assert max(map(len, pat.prompts)) == 1024 - 48 - 1
    assert (stock.engine["max_model_len"], stock.engine["max_num_seqs"]) == (1024, 64)
    # More than the random model's contexts: also of vLLM's "as much as there is room for".
    for length in (1 << 17, -1):
        _, pat = as_used(monkeypatch, ON_GPUS, engine={"max_model_len": length})
        assert pat.engine["max_model_len"] == 4096 and "max_model_len=4096" in pat.as_used


def test_it_stops_at_the_first_stage_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    check = {"check": {"name": "start", "problem": "EngineDeadError: it died\nmore"}}
    log = "Worker proc VllmWorker-1 died unexpectedly (exit code: -9)\nits end"
    children = Children(ON_GPUS, {4: (check, ChildResult(1, log))})
    by_name = run_with(monkeypatch, children, all=True)
    assert status_of(by_name) == "psspfss"
    assert by_name["piecewise"].why == "start: rank 1 died, exit code -9 (EngineDeadError: it died)"
    assert by_name["piecewise"].log[-1] == "its end"
    assert by_name["full"].why == "'piecewise' failed"
    assert len(children.tasks) == 4


@pytest.mark.parametrize(
    ("code", "why"), [(3, "ended with exit code 3"), (None, "it hangs: nothing for 420 s")]
)
def test_a_process_that_ends_before_its_check_does(
    code: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    doing = {"doing": "layout tp1dp2"}
    by_name = run_with(monkeypatch, Children(ON_CPU, {2: (doing, ChildResult(code, ""))}))
    assert by_name["eager"].why.startswith("layout tp1dp2: ") and why in by_name["eager"].why


def test_too_little_memory_and_refusals_are_stages_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = dict(ranks=8, gpu="H100", model=Path("m"))
    by_name = run_with(monkeypatch, Children(ON_GPUS), **options)
    assert status_of(by_name) == "ppfssss"
    assert "too little memory" in by_name["memory"].why
    # Without --gpu, memory is computed for the smallest that is here.
    small = dataclasses.replace(GPU, memory=40 << 30)
    here = dataclasses.replace(ON_GPUS, devices=(GPU, small) * 4)
    by_name = run_with(monkeypatch, Children(here), ranks=8, model=Path("m"), pat={"base_tp": 4})
    assert "weights take 32.9 GiB of the 36.8 GiB" in by_name["memory"].why
    refused = dataclasses.replace(ON_GPUS, refused="quantization='fp8' (allowed: None)")
    assert status_of(run_with(monkeypatch, Children(refused), **options)) == "pfsssss"
    # Without --model it is the self-test's own engine that is refused: the environment's affair.
    assert status_of(run_with(monkeypatch, Children(refused))) == "fssssss"


def test_that_one_layout_is_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = dataclasses.replace(ON_GPUS, config=dict(MODEL_SHAPES["qwen3-32b"]))
    options: dict[str, Any] = dict(ranks=8, gpu="A40", model=Path("m"), pat={}, engine={})
    memory = run_with(monkeypatch, Children(facts), **options)["memory"]
    assert memory.status == "passed"
    assert "warning: one layout, tp=8, is kept" in memory.checks[0].found


DIED = "ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: {}), shutting down"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (DIED.format(-9), "rank 1 died, exit code -9"),
        (DIED.format(None), "rank 1 died"),
        # It has ended by itself: why is told elsewhere.
        (DIED.format(0), None),
        ("RayWorkerProc rank=2 died unexpectedly, shutting", "rank 2 died"),
        (
            f"{DIED.format(1)}\nValueError: To serve at least one request, more",
            "too little memory: To serve at least one request, more",
        ),
        ("all is well", None),
    ],
)
def test_last_words_are_explained(log: str, cause: str | None) -> None:
    assert explain(log) == cause

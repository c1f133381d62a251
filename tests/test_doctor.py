"""`pat-vllm doctor`: comparing, computing, stages and what is shown, without an engine."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pat_vllm.cli.doctor as command
from pat_vllm.cli import app
from pat_vllm.cli.doctor_plot import plot
from pat_vllm.config import PATConfig
from pat_vllm.doctor import stages
from pat_vllm.doctor.arithmetic import check_memory, engine_shape, gpu_named
from pat_vllm.doctor.child import Run, run_module
from pat_vllm.doctor.compare import (
    LEAST_TOLERANCE,
    Output,
    Reference,
    compare_forced,
    compare_outputs,
)
from pat_vllm.doctor.environment import FACTS, Device, Facts
from pat_vllm.doctor.session import REFERENCES, SESSION
from pat_vllm.doctor.stages import Models, Plan, environment_checks, run_stages
from pat_vllm.doctor.symptoms import explain
from pat_vllm.doctor.values import Check, Stage, Verdict, without_names
from tests.support.mutation import mutated

STOCK = (
    Output((5, 6), (-0.1, -0.2), ({5: -0.1, 9: -0.1002}, {6: -0.2, 8: -3.0})),
    Output((7,), (-1.0,), ({7: -1.0},)),
)
REFERENCE = Reference(STOCK, ((-0.1, -0.2), (-1.0,)))

# ---------------------------------------------------------------- comparing


def ours(*changed: tuple[tuple[int, ...], tuple[float, ...]]) -> list[Output]:
    """STOCK as another engine would have it, its first requests changed."""
    rest = [(one.tokens, one.logprobs) for one in STOCK[len(changed) :]]
    return [Output(tokens, logprobs) for tokens, logprobs in (*changed, *rest)]


def test_the_same_is_the_same() -> None:
    found = compare_outputs(STOCK, ours(), 1e-4)
    assert (found.problem, found.compared, found.ties, found.worst) == (None, 3, 0, 0.0)
    close = compare_outputs(STOCK, ours(((5, 6), (-0.10005, -0.2))), 1e-4)
    assert close.problem is None
    assert close.worst == pytest.approx(5e-5)


def check_differences() -> None:
    def problem(*changed: tuple[tuple[int, ...], tuple[float, ...]]) -> str:
        return compare_outputs(STOCK, ours(*changed), 1e-4).problem or ""

    assert "wrong log-probability: request 0, token 1 has -0.200300" in problem(
        ((5, 6), (-0.1, -0.2003))
    )
    assert "wrong log-probability" in problem(((5, 6), (-0.1, math.nan)))
    assert "wrong token: request 0, token 1 is 8, in stock vLLM 6" in problem(
        ((5, 8), (-0.1, -0.2))
    )
    assert "is not among its likeliest" in problem(((5, 3), (-0.1, -0.2)))
    assert "request 0 has 1 tokens instead of 2" in problem(((5,), (-0.1,)))
    forced = compare_forced(((-0.1, -0.2),), ((-0.1, -0.9),), 1e-4).problem
    assert forced is not None and "token 1 (as a prompt's)" in forced


def test_differences_are_named() -> None:
    check_differences()


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (compare_outputs, {"if not apart <= tolerance": "if apart > tolerance and False"}),
        (compare_outputs, {"its is not None and best - its": "its is None or best - 9 - its"}),
        (compare_forced, {"if not _distance(a, b) <= tolerance": "if False"}),
    ],
)
def test_a_comparison_that_overlooks_is_found(function: Any, change: dict[str, str]) -> None:
    with mutated(function, change), pytest.raises(AssertionError):
        check_differences()


def test_a_tie_is_no_mistake_and_ends_the_comparison() -> None:
    found = compare_outputs(STOCK, ours(((9, 1), (-0.1001, -7.0))), LEAST_TOLERANCE)
    assert (found.problem, found.ties, found.compared) == (None, 1, 1)


def test_the_tolerance_follows_stock_vllms_own_noise() -> None:
    assert REFERENCE.noise == 0.0 and REFERENCE.tolerance == LEAST_TOLERANCE
    noisy = dataclasses.replace(REFERENCE, forced=((-0.11, -0.2), (-1.0,)))
    assert noisy.tolerance == pytest.approx(0.04)
    assert noisy.problem is None
    broken = dataclasses.replace(REFERENCE, forced=((-5.0, -0.2), (-1.0,)))
    assert "does not agree with itself" in (broken.problem or "")
    nothing = dataclasses.replace(REFERENCE, forced=((math.nan, -0.2), (-1.0,)))
    assert nothing.problem is not None


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("rank", "rank 1 died, exit code -9 (EngineDeadError: it died)"),
        ("memory", "too little memory: To serve at least one request"),
        ("killed", "the process ended with exit code -9"),
        ("hangs", "it hangs: nothing for 2 s"),
    ],
)
def test_how_a_process_ends_is_told(mode: str, problem: str) -> None:
    import os

    doing: list[str] = []
    run = run_module("tests.support.doctor_child", mode, os.environ, doing.append, silence=2.0)
    assert doing == ["tp1dp2 -> tp2dp1"]
    assert run.answer is None
    assert run.checks[-1].name == "tp1dp2 -> tp2dp1"
    assert problem in (run.checks[-1].problem or "")


def test_a_process_that_ends_well_leaves_an_answer() -> None:
    import os

    run = run_module("tests.support.doctor_child", "fine", os.environ, lambda what: None)
    assert (run.answer, run.checks) == ("42", (Check("start", "it is"),))


def test_symptoms() -> None:
    assert explain("all is well") is None
    assert explain("Worker proc VllmWorker-3 died unexpectedly, shutting down") == "rank 3 died"
    both = "torch.OutOfMemoryError: CUDA out of memory.\nWorker proc VllmWorker-3 died unexpectedly"
    assert explain(both) == "too little memory: torch.OutOfMemoryError: CUDA out of memory."


# ---------------------------------------------------------------- memory by arithmetic

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def memory_of(base_tp: int, **config: Any) -> Check:
    model = {**LLAMA_70B, **config}
    shape = engine_shape(model, PATConfig(base_tp=base_tp), 8, {"max_num_seqs": 128, "seed": 1})
    assert shape.max_num_seqs == 128 and shape.max_model_len == 32768
    return check_memory(model, gpu_named("H100"), shape)


def test_a_model_that_has_no_room_is_told_with_the_way_out() -> None:
    check = memory_of(1)
    assert check.problem is not None
    assert "too little memory: at base layout tp1dp8 weights take 131." in check.problem
    assert "base_tp=4 has room for" in check.problem
    fits = memory_of(4)
    assert fits.problem is None
    assert fits.values["kv_tokens_per_replica"] > 400_000
    assert fits.values["computed"] is True


def test_what_cannot_be_computed_is_said() -> None:
    check = memory_of(1, model_type="mamba")
    assert check.problem is None and "not computed" in check.found
    with pytest.raises(ValueError, match="--gpu 'H900' is not known; allowed: H100, H200"):
        gpu_named("H900")


# ---------------------------------------------------------------- stages

GPU = Device("H100", "9.0", 80 << 30, 79 << 30)
ON_CPU = Facts(
    {"vllm": "0.32.0"}, "cpu", {"kind": "a CPU", "cores": 2, "numa_nodes": 1}, 24 << 30, 20 << 30
)
ON_GPUS = dataclasses.replace(
    ON_CPU,
    platform="cuda",
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

    def __call__(self, module: str, request: str, *_: Any) -> Run:
        if module.endswith("environment"):
            return Run(FACTS.dump_json(self.facts).decode(), "", ())
        session = SESSION.validate_json(request)
        self.sessions.append(session)
        problem = self.ends.get(len(self.sessions))
        if problem is not None:
            return Run(None, "the log\nits end", (Check("start", problem=problem),))
        made = None if session.references else REFERENCES.dump_json((REFERENCE,) * 2).decode()
        return Run(made, "", (Check("start"),))


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
        environment=lambda ranks: {},
    )
    models = Models(Path("first"), Path("other"), 512, (4, 0, 1))
    found = run_stages(Plan(**{**plan, **options}), lambda: models, lambda what: None)
    return {stage.name: stage for stage in found}


def status_of(found: dict[str, Stage]) -> list[str]:
    return [stage.status[0] for stage in found.values()]


def test_by_default_only_eager_engines_run(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_CPU)
    found = run_with(monkeypatch, children)
    assert status_of(found) == ["p", "s", "s", "p", "s", "s"]
    stock, pat = children.sessions
    assert "worker_extension_cls" not in stock.engine and stock.engine["block_size"] == 32
    assert "distributed_executor_backend" not in stock.engine
    assert pat.engine["additional_config"]["pat"] == {
        "base_tp": 1,
        "policy": {"kind": "static", "tp": 1},
        "weights": "inplace",
    }
    assert pat.engine["dtype"] == "float32" and pat.engine["enforce_eager"] is True
    assert pat.engine["speculative_config"]["num_speculative_tokens"] == 4
    assert pat.references == (REFERENCE, REFERENCE)


def test_all_stages_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_GPUS)
    found = run_with(monkeypatch, children, all=True)
    assert status_of(found) == ["p", "s", "s", "p", "p", "p"]
    modes = [one.engine.get("compilation_config") for one in children.sessions]
    assert modes == [None, None, {"cudagraph_mode": "PIECEWISE"}, {"cudagraph_mode": "FULL"}]
    assert "enforce_eager" not in children.sessions[-1].engine
    assert children.sessions[-1].engine["dtype"] == "bfloat16"
    assert children.sessions[-1].engine["enable_sleep_mode"] is True
    # A CPU has none.
    assert status_of(run_with(monkeypatch, Children(ON_CPU), all=True))[4:] == ["s", "s"]


def test_it_stops_at_the_first_stage_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(ON_GPUS, {3: "rank 1 died"})
    found = run_with(monkeypatch, children, all=True)
    assert status_of(found) == ["p", "s", "s", "p", "f", "s"]
    assert found["piecewise"].why == "start: rank 1 died"
    assert found["piecewise"].log == ("the log", "its end")
    assert found["full"].why == "'piecewise' failed"
    assert len(children.sessions) == 3


def test_too_little_memory_and_refusals_are_stages_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = dict(ranks=8, gpu=gpu_named("H100"), machine=False, model=Path("m"))
    found = run_with(monkeypatch, Children(ON_GPUS), **options)
    assert status_of(found) == ["p", "p", "f", "s", "s", "s"]
    assert "too little memory" in found["memory"].why
    refused = dataclasses.replace(ON_GPUS, refused="quantization='fp8' (allowed: None)")
    found = run_with(monkeypatch, Children(refused), **options)
    assert status_of(found) == ["p", "f", "s", "s", "s", "s"]
    assert "quantization='fp8'" in found["model"].why
    # Without --model it is the self-test's own engine that is refused: the environment's affair.
    found = run_with(monkeypatch, Children(refused))
    assert status_of(found) == ["f", "s", "s", "s", "s", "s"]


# ---------------------------------------------------------------- what is shown

FAILED = Verdict(
    "2026-01-01T00:00:00+00:00",
    "pat-vllm doctor",
    (
        Stage.of("environment", [Check("versions", "[vllm] $0_32$")], 3.0),
        Stage.of("eager", [Check("start", problem="rank 1 died")], 60.0, "one\nlast words"),
        Stage.skipped("piecewise", "'eager' failed"),
    ),
)


def test_a_verdict_is_json_and_back_and_a_picture(tmp_path: Path) -> None:
    assert Verdict.from_json(FAILED.to_json()) == FAILED
    assert FAILED.sentence == "Not fit: stage 'eager' failed. start: rank 1 died"
    plot(FAILED, tmp_path / "doctor.png")
    assert (tmp_path / "doctor.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_users_and_folders_are_left_out() -> None:
    names = {"/home/ann": "~", "ann": "<user>", "/home/ann/venv": "<python>", "box": "<host>"}
    text = "/home/ann/venv/lib /home/ann/x ann@box annual boxes /home/anna"
    cleaned = without_names(text, names)
    assert cleaned == "<python>/lib ~/x <user>@<host> annual boxes /home/anna"


def invoke(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["doctor", *arguments])
    return outcome.exit_code, " ".join(outcome.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "H100"), "name one by --model"),
        (("--shape", "huge"), "allowed: tiny, large"),
        (("--engine", "{"), "--engine takes a JSON object"),
        (("--engine", "[1]"), "--engine takes a JSON object"),
        (("--model", "nowhere"), "neither a config.json nor a folder"),
        (("--layouts", "3"), "tp=3, which does not divide"),
    ],
)
def test_what_a_user_got_wrong_is_said(arguments: tuple[str, ...], said: str) -> None:
    code, text = invoke(*arguments)
    assert code == 2
    assert said in text


@pytest.mark.parametrize(("found", "code"), [(FAILED.stages, 1), (FAILED.stages[:1], 0)])
def test_exit_status_table_and_files(
    found: tuple[Stage, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_stages", lambda *args: iter(found))
    exit_code, text = invoke("--output-dir", str(tmp_path / "out"))
    assert exit_code == code, text
    assert "[vllm] $0_32$" in text
    assert ("last words" in text and "Not fit" in text) == bool(code)
    written = json.loads((tmp_path / "out" / "doctor.json").read_text())
    assert [one["name"] for one in written["stages"]] == [one.name for one in found]
    assert (tmp_path / "out" / "doctor.png").exists()


def test_models_of_any_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def make_model(path: Path, **sizes: Any) -> None:
        made.append(sizes)

    monkeypatch.setattr(command.random_model, "make_model", make_model)
    for ranks in (2, 3, 6, 8):
        models = command.self_test_models(tmp_path, "tiny", ranks, 5)
        assert made[-1].get("heads", 8) % ranks == 0 == made[-1]["intermediate"] % ranks
        assert models.draft_lengths == (5, 0, 1, 2, 4, 5)
    assert [one["seed"] for one in made[:2]] == [0, 1]
    assert command.self_test_models(tmp_path, "tiny", 2, 0).draft_lengths == ()

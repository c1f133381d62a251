"""`pat-vllm doctor`: comparing, computing and what is shown, without an engine."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pat_vllm.cli.doctor as command
from pat_vllm.cli import app, doctor_models
from pat_vllm.cli.doctor_plot import plot
from pat_vllm.config import PATConfig
from pat_vllm.doctor.arithmetic import check_memory, engine_shape, gpu_named
from pat_vllm.doctor.child import run_module
from pat_vllm.doctor.compare import (
    LEAST_TOLERANCE,
    Output,
    Reference,
    compare_forced,
    compare_outputs,
)
from pat_vllm.doctor.symptoms import explain
from pat_vllm.doctor.values import Check, Stage, Verdict, without_names
from pat_vllm.model_size import MODEL_SHAPES
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
        ("hangs", "it hangs: nothing for 10 s"),
    ],
)
def test_how_a_process_ends_is_told(mode: str, problem: str) -> None:
    doing: list[str] = []
    run = run_module("tests.support.doctor_child", mode, os.environ, doing.append, silence=10.0)
    assert doing == ["tp1dp2 -> tp2dp1"]
    assert run.answer is None
    assert run.checks[-1].name == "tp1dp2 -> tp2dp1"
    assert problem in (run.checks[-1].problem or "")


def test_a_process_that_ends_well_leaves_an_answer() -> None:
    run = run_module("tests.support.doctor_child", "fine", os.environ, lambda what: None)
    assert (run.answer, run.checks) == ("42", (Check("start", "it is"),))


SUPERVISOR = """
import os
from pat_vllm.doctor.child import ending_by_signals, run_module

with ending_by_signals():
    module, say = "tests.support.doctor_child", lambda pid: print(pid, flush=True)
    run_module(module, "starts another", os.environ, say)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_that_it_has_started(number: int) -> None:
    command = [sys.executable, "-c", SUPERVISOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            other = int(supervisor.stdout.readline())
            os.kill(other, 0)
            supervisor.send_signal(number)
            assert supervisor.wait(timeout=120) == 128 + number
        finally:
            supervisor.kill()
    assert not runs(other)


def test_a_process_that_is_killed_leaves_nothing_running() -> None:
    started: list[str] = []
    run_module("tests.support.doctor_child", "starts another, killed", os.environ, started.append)
    (other,) = started
    assert not runs(int(other))


def runs(pid: int) -> bool:
    """Whether a process that was sent SIGKILL goes on after half a minute."""
    for _ in range(300):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.1)
    return True


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


def test_memory_of_a_mixture() -> None:
    """All experts of Qwen3-30B-A3B leave a GPU of 80 GB some KV, which half of them triple."""
    mixture = {**MODEL_SHAPES["qwen3-30b-a3b"], "max_position_embeddings": 40960}
    found = [memory_of(base_tp, **mixture) for base_tp in (1, 2)]
    assert all(one.problem is None for one in found)
    whole, half = (one.values["kv_tokens_per_replica"] for one in found)
    assert 32768 < whole < half / 3


def test_what_cannot_be_computed_is_said() -> None:
    check = memory_of(1, model_type="mamba")
    assert check.problem is None and "not computed" in check.found
    with pytest.raises(ValueError, match="--gpu 'H900' is not known; allowed: H100, H200"):
        gpu_named("H900")


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
        (("--shape", "huge"), "allowed: tiny, moe, large, model"),
        (("--shape", "model"), "name one by --model"),
        (("--engine", "{"), "--engine takes a JSON object"),
        (("--engine", "[1]"), "--engine takes a JSON object"),
        (("--model", "nowhere"), "neither a config.json nor a folder"),
        (("--pat", '{"layouts": [3]}'), "tp=3, which does not divide"),
        (("--pat", '{"base": 2}'), "unknown option 'base'"),
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

    monkeypatch.setattr(doctor_models.random_model, "make_model", make_model)
    for ranks in (2, 3, 6, 8):
        sizes = doctor_models.sizes_of("tiny", None, ranks)
        models = doctor_models.self_test_models(tmp_path, sizes, 5)
        assert made[-1].get("heads", 8) % ranks == 0 == made[-1]["intermediate"] % ranks
        assert models.draft_lengths == (5, 0, 1, 2, 4, 5)
    assert [one["seed"] for one in made[:2]] == [0, 1]
    assert doctor_models.self_test_models(tmp_path, sizes, 0).draft_lengths == ()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_model_of_a_users_shape(kind: str, tmp_path: Path) -> None:
    config = {**MODEL_SHAPES["llama-3.1-8b"], "model_type": kind, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = doctor_models.sizes_of("model", tmp_path, 8)
    assert (sizes["arch"], sizes["heads"], sizes["kv_heads"], sizes["layers"]) == (kind, 32, 8, 2)
    assert sizes["intermediate"] % 8 == 0 and sizes["vocab"] == 32000 and sizes["tie"] is True
    assert (sizes["hidden"] == 32 * sizes["head_dim"]) == (kind == "qwen2")
    small = {**config, "hidden_size": 96, "head_dim": 32, "intermediate_size": 80, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert doctor_models.sizes_of("model", tmp_path, 2)["hidden"] == 96
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    with pytest.raises(ValueError, match="makes random models of qwen3, qwen2, llama, not of"):
        doctor_models.sizes_of("model", tmp_path, 2)

"""`benchmarks.gpu` on CPU: tiny shapes through all of it, and its kernels in the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import permutations
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.gpu import decode, profiles, report, torch_ops
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_14B, TINY
from pat_vllm.model_size import MODEL_SHAPES
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.modelled.figures import GPUS, STEP_OVERHEAD
from pat_vllm.simulator.modelled.roofline import layer_communication
from tests.triton_kernels import hopper_code, in_interpreter, needs_triton

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = main(["--device", "cpu", "--quick", "--out", str(tmp_path_factory.mktemp("results"))])
    assert path.with_suffix(".md").read_text().count("## ") == 4
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_part_is_measured_for_every_shape(results):
    for part in ("ceiling", "reshard", "kv", "decode"):
        assert all(
            row["ms"] > 0 and row["low_ms"] <= row["ms"] <= row["high_ms"]
            for row in results[part]["rows"]
            if "ms" in row
        )
    assert results["ceiling"]["copy_bytes_per_second"] > 0
    reshards = results["reshard"]["rows"]
    assert {(r["source"], r["target"]) for r in reshards} == {*permutations((1, 2, 4, 8), 2)}
    assert {r["rank"] for r in reshards} == {0, 5, 7}
    packing = results["kv"]["rows"]
    assert {(r["what"], r["direction"]) for r in packing} == {
        (what, direction)
        for what in ("pack", "unpack")
        for direction in (
            "tp1dp2 to tp2dp1",
            "tp2dp1 to tp1dp2",
            "tp1dp4 to tp4dp1",
            "tp4dp1 to tp1dp4",
        )
    }
    steps = results["decode"]["rows"]
    assert {(r["tp"], r["batch"], r["context"]) for r in steps} == {
        (tp, batch, context) for tp in (1, 2, 4, 8) for batch in (1, 3) for context in (32, 80)
    }
    assert {r["tp"] for r in results["decode"]["strided_row_parallel"]} == {2, 4, 8}


def test_bytes_are_counted_by_hand(results):
    (reshard, *_) = (
        r for r in results["reshard"]["rows"] if (r["walk"], r["rank"]) == ("1-2-1", 0)
    )
    # Rank 0 of two keeps its gate rows and half of q, k, v: up comes to gate, k to q, v to k.
    # Each of these ranges is read and written, and so is what it trades places with.
    up, k = TINY.intermediate // 2, TINY.kv_heads // 2 * TINY.head_dim
    rows = 2 * (up + k) + 2 * k
    assert reshard["bytes_read_and_written"] == 2 * TINY.layers * rows * TINY.hidden * 2

    pack = next(r for r in results["kv"]["rows"] if (r["requests"], r["tokens"]) == (3, 64))
    token = 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 2
    assert pack["bytes_read_and_written"] == 2 * 3 * 64 * token

    step = next(r for r in results["decode"]["rows"] if (r["tp"], r["batch"]) == (2, 3))
    attention = TINY.hidden * TINY.head_dim * (2 * TINY.heads + 2 * TINY.kv_heads) // 2
    mlp = 3 * TINY.hidden * TINY.intermediate // 2
    weights = TINY.layers * (attention + mlp) + TINY.vocab * TINY.hidden // 2
    assert step["bytes_read"] == 2 * weights + 3 * step["context"] * token // 2


def test_measuring_needs_neither_vllm_nor_pydantic():
    code = (
        "import sys, benchmarks.gpu.__main__\n"
        "assert not {'vllm', 'pydantic', 'typer', 'psutil', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=report.ROOT, check=True)


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "no GPU is at hand" in capsys.readouterr().err


def test_a_shape_is_its_config_and_back():
    for shape in (LLAMA_8B, QWEN_14B):
        assert shape.config() == MODEL_SHAPES[shape.name]


# -------------------------------------------------------------------- profiles


def as_if_on(device: str, results: dict[str, Any]) -> dict[str, Any]:
    return {**results, "machine": {**results["machine"], "device": device}}


def test_a_profile_says_what_was_measured_and_what_was_modelled(results, tmp_path):
    profile = profiles.profile_of(as_if_on("NVIDIA H200", results), TINY)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    assert profile.kind == "modelled" and profile.key["modelled"] is True
    for text in (profile.title, profile.note):
        assert "measured on NVIDIA H200" in text and "modelled" in text
    decodes = [s for s in profile.steps if not s.prefill]
    assert len(decodes) == len(results["decode"]["rows"])
    for sample, row in zip(decodes, results["decode"]["rows"], strict=True):
        added = STEP_OVERHEAD + TINY.layers * layer_communication(
            GPUS["H200"], "nvlink", row["tp"], row["batch"] * TINY.hidden * 2
        )
        assert sample.seconds == pytest.approx(row["ms"] / 1e3 + added)
        assert (sample.context, sample.longest) == (row["batch"] * row["context"], row["context"])
    assert any(s.prefill for s in profile.steps) and profile.switches


def test_a_gpu_without_public_figures_makes_no_profile(results):
    with pytest.raises(ValueError, match="between B1s cannot be modelled"):
        profiles.profile_of(as_if_on("B1", results), TINY)
    with pytest.raises(ValueError, match="no decode steps of qwen3-14b"):
        profiles.profile_of(as_if_on("NVIDIA H200", results), QWEN_14B)


def test_results_are_readable_json():
    content = {"a": [], "b": {"c": [1, 2], "d": [{"e": None}, {"f": "g"}]}}
    text = report.to_json(content)
    assert json.loads(text) == content
    assert '"c": [1, 2],' in text and '{"f": "g"}' in text


# -------------------------------------------------------------------- kernels


def test_wrong_kernels_are_noticed():
    def no_positions(qkv: Any, cache: Any, tables: Any, lengths: Any, rotary: Any, *rest: Any):
        torch_ops.rotate_and_cache(qkv, cache, tables, lengths, rotary[:1].expand_as(rotary), *rest)

    ops = ModuleType("ops")
    vars(ops).update(vars(torch_ops), rotate_and_cache=no_positions)
    with pytest.raises(AssertionError, match="logits are off by"):
        decode.check_ops(CPU, ops)


@needs_triton
def test_triton_kernels_compute_what_torch_does_in_the_interpreter():
    errors = [float(error) for error in in_interpreter("tests.test_gpu_benchmarks").split()]
    assert errors[0] < 1e-5 and errors[1] < 5e-3


def _in_interpreter() -> None:
    """Errors of the kernels in float32 and float16; the interpreter's dot takes no bfloat16."""
    from benchmarks.gpu import triton_ops

    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        print(decode.check_ops(CPU, triton_ops, dtype))


@needs_triton
def test_attention_reads_kv_16_bytes_at_a_time_on_hopper():
    from benchmarks.gpu import triton_ops

    pointers = {name: "*bf16" for name in ("qkv", "cache")}
    pointers |= {"tables": "*i32", "lengths": "*i32", "partial": "*fp32", "sums": "*fp32"}
    code = hopper_code(
        triton_ops._attend,
        {**pointers, "scale": "fp32", "table_stride": "i32"},
        {
            "KV_HEADS": 8,
            "GROUP": 4,
            "PADDED": 16,
            "DIM": 128,
            "TOKENS": 16,
            "KEYS": 64,
            "SPLITS": 16,
        },
    )
    # Asynchronously, into shared memory: the next keys and values while these are computed with.
    assert code.count("cp.async.cg.shared.global") >= 16


if __name__ == "__main__":
    _in_interpreter()

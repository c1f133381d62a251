"""`benchmarks.gpu` on the CPU: tiny shapes through all of it, and its kernels interpreted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import decode, engines, profiles, report, reshard
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_14B, TINY, scale_of
from benchmarks.gpu.timing import Stopwatch
from pat_vllm.gpus import GPUS
from pat_vllm.known_models import MODEL_SHAPES
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.modelled.figures import STEP_OVERHEAD
from pat_vllm.simulator.modelled.roofline import layer_communication
from tests.vllm.kernels.triton_kernels import hopper_code, in_interpreter, needs_triton

CPU = torch.device("cpu")
MS = [f"{whose}{which}ms" for whose in ("", "stock_") for which in ("", "low_", "high_")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = main(["--device", "cpu", "--quick", "--out", str(tmp_path_factory.mktemp("results"))])
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_every_part_is_measured_for_every_shape(results: dict[str, Any]) -> None:
    assert results["ceiling"]["copy_bytes_per_second"] > 0
    ways = {(r["source"], r["target"]) for r in results["reshard"]["rows"]}
    assert ways == {*permutations((1, 2, 4, 8), 2)}
    assert {r["what"] for r in results["kv"]["rows"]} == {"pack", "unpack"}
    steps = {(r["tp"], r["batch"], r["context"]) for r in results["decode"]["rows"]}
    assert steps == {*product((1, 2, 4, 8), (1, 3), (32, 80))}


def test_bytes_are_those_counted_by_hand(results: dict[str, Any]) -> None:
    reshard = next(r for r in results["reshard"]["rows"] if (r["walk"], r["rank"]) == ("1-2-1", 0))
    # Rank 0 of two keeps its gate rows and half of q, k, v: up comes to gate, k to q, v to k.
    # Each of these ranges is read and written, and so is what it trades places with.
    up, k = TINY.intermediate // 2, TINY.kv_heads // 2 * TINY.head_dim
    rows = 2 * (up + k) + 2 * k
    assert reshard["bytes_read_and_written"] == 2 * TINY.layers * rows * TINY.hidden * 2

    token = 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 2
    pack = next(r for r in results["kv"]["rows"] if (r["requests"], r["tokens"]) == (3, 64))
    assert pack["bytes_read_and_written"] == 2 * 3 * 64 * token
    step = next(r for r in results["decode"]["rows"] if (r["tp"], r["batch"]) == (2, 3))
    attention = TINY.hidden * TINY.head_dim * (2 * TINY.heads + 2 * TINY.kv_heads) // 2
    mlp = 3 * TINY.hidden * TINY.intermediate // 2
    weights = TINY.layers * (attention + mlp) + TINY.vocab * TINY.hidden // 2
    assert step["bytes_read"] == 2 * weights + 3 * step["context"] * token // 2


def test_the_makefile_measures_engines_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    makefile = (report.ROOT / "Makefile").read_text()
    (arguments,) = re.findall(r"-m benchmarks\.gpu (.*)", makefile)
    asked: list[Any] = []
    steps = {"layout": "tp2dp1", "requests": 1, "ratio": 1.0, **dict.fromkeys(MS, 1.0)}
    sizes = dict.fromkeys(("weights", "held", "memory", "stock_memory"), 1 << 20)
    measured = {
        **{"shape": "large", "memory_of": "of a process", "steps": [steps]},
        "memory": [{"layout": "tp2dp1", "stock_weights": None, **sizes}],
    }

    def measure(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return measured

    monkeypatch.setattr(engines, "measure", measure)
    words = arguments.replace("$(GPUS)", "2").split()
    path = main([*words, "--device", "cpu", "--parts", "kv", "--out", str(tmp_path)])
    assert asked == [(2, "large", True)]
    page = path.with_suffix(".md").read_text()
    assert "| tp2dp1 | one alone | 1.000 (1.000-1.000) |" in page
    assert "| tp2dp1 | 1.0 | packed | 1.0 | 1.0 | 1.0 |" in page


def test_measuring_needs_neither_vllm_nor_pydantic() -> None:
    code = (
        "import sys, benchmarks.gpu.__main__\n"
        "assert not {'vllm', 'pydantic', 'typer', 'psutil', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=report.ROOT, check=True)


def test_profile_has_what_was_measured_and_modelled_communication(results: dict[str, Any]) -> None:
    def profile_on(device: str) -> Profile:
        machine = {**results["machine"], "device": device}
        return profiles.profile_of({**results, "machine": machine}, TINY)

    profile = profile_on("NVIDIA H200")
    assert profile.kind == "modelled" and "measured on NVIDIA H200" in profile.title
    decodes = [s for s in profile.steps if not s.prefill]
    for sample, row in zip(decodes, results["decode"]["rows"], strict=True):
        added = STEP_OVERHEAD + TINY.layers * layer_communication(
            GPUS["H200"], "nvlink", row["tp"], row["batch"] * TINY.hidden * 2
        )
        assert sample.seconds == pytest.approx(row["ms"] / 1e3 + added)
    for shape in (LLAMA_8B, QWEN_14B):
        assert shape.config().items() <= MODEL_SHAPES[shape.name].items()
    with pytest.raises(ValueError, match="between B1s cannot be modelled"):
        profile_on("B1")


def test_wrong_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch, scale = Stopwatch(CPU, 2), scale_of(CPU, quick=True)
    prepare = reshard.prepare
    monkeypatch.setattr(reshard, "prepare", lambda rounds: prepare([]))
    with pytest.raises(AssertionError, match="the shard of qkv is wrong"):
        reshard.measure(stopwatch, scale, 1.0)


@needs_triton
def test_interpreted_triton_kernels_compute_what_torch_does() -> None:
    errors = [float(error) for error in in_interpreter("tests.vllm.benchmarks.test_gpu").split()]
    assert errors[0] < 1e-5 and errors[1] < 5e-3


def _in_interpreter() -> None:
    """Errors of the kernels in float32 and float16; the interpreter's dot takes no bfloat16."""
    from benchmarks.gpu import triton_ops

    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        print(decode.check_ops(CPU, triton_ops, dtype))


@needs_triton
def test_attention_reads_kv_16_bytes_at_a_time_on_hopper() -> None:
    from benchmarks.gpu import triton_ops

    pointers = {name: "*bf16" for name in ("qkv", "cache")}
    pointers |= {"tables": "*i32", "lengths": "*i32", "partial": "*fp32", "sums": "*fp32"}
    sizes = dict(KV_HEADS=8, GROUP=4, PADDED=16, DIM=128, TOKENS=16, KEYS=64, SPLITS=16)
    code = hopper_code(
        triton_ops._attend, {**pointers, "scale": "fp32", "table_stride": "i32"}, sizes
    )
    # Asynchronously, into shared memory: the next keys and values while these are computed with.
    assert code.count("cp.async.cg.shared.global") >= 16


if __name__ == "__main__":
    _in_interpreter()

"""What is decided on GPUs' platforms: who serves KV caches, and for which batches is compiled."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpuless.matrix import CUDA, GIVEN_ENDS, MODELS, REFUSED_OPTIONS, ROCM, RUNNERS, SHUFFLED
from tests.gpuless.platform_mistakes import COMPILE_RANGES, MISTAKES, OPTIONS
from tests.gpuless.platforms import DEFAULTS_ONLY, PLATFORMS
from tests.support.child import Child

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
V2_ON_CPU = ROOT / "tests" / "support" / "v2_on_cpu"

FIRST_CHOICE = {
    "sm80": "FlashAttentionBackend",
    "sm89": "FlashAttentionBackend",
    "sm90": "FlashAttentionBackend",
    "sm100": "FlashInferBackend",
    "sm103": "FlashInferBackend",
    "sm120": "FlashAttentionBackend",
    "rocm": "TritonAttentionBackend",
    "gfx950": "TritonAttentionBackend",
    "gfx1201": "TritonAttentionBackend",
}
REFUSED = {
    "ROCM_ATTN": ("front end", "attention_backend='ROCM_ATTN'", "TRITON_ATTN"),
    "ROCM_SEGMENTED_ATTN": ("front end", "attention_backend='ROCM_SEGMENTED_ATTN'", "TRITON_ATTN"),
    "B12X": ("front end", "attention_backend='B12X'", "TRITON_ATTN"),
    SHUFFLED: ("worker", "AiterFlashAttentionBackend", "set attention_backend='TRITON_ATTN'"),
}
"""Who refuses, and what the error says: the backend, and the setting that helps."""
ALLOWED = {
    "enable_batch_sharded_sampling": "enable_batch_sharded_sampling=True (allowed: False",
    "cpu_offload_gb": "cpu_offload_gb=1.5 (allowed: 0",
    "offload_group_size": "offload_group_size=2 (allowed: 0",
    "weight_transfer_config": "weight_transfer_config.backend='sharded_rdt' (allowed: nccl, ipc",
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the child says, case by case."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(V2_ON_CPU), str(ROOT)])
    child = Child(
        [sys.executable, "-m", "tests.gpuless.matrix"],
        tmp_path_factory.mktemp("matrix") / "log",
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
    )
    try:
        assert child.wait() == 0, child.tail()
    finally:
        child.kill()
    return [json.loads(line) for line in child.output.splitlines() if line.startswith('{"what":')]


def of(lines: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """The lines with these values; of PAT as it is, unless a mistake is named."""
    wanted = {"mistake": None} | wanted
    return [line for line in lines if all(line.get(key) == it for key, it in wanted.items())]


def check(line: dict[str, Any]) -> None:
    """Whether PAT does what it should in a case."""
    if line["what"] == COMPILE_RANGES:
        assert line["of_layout"] == line["of_stock"], line
    elif line["what"] == OPTIONS:
        assert line["refused"] is not None, f"{line['option']} passes"
        assert ALLOWED[line["option"]] in line["refused"]
    else:
        _check_case(line)


def _check_case(case: dict[str, Any]) -> None:
    backend = case["backend"]
    assert "failed" not in case, case
    if backend in REFUSED:
        refused_by, *said = REFUSED[backend]
        assert case.get("refused_by") == refused_by, case
        assert all(one in case["refused"] for one in said), case
        return
    if "refused" in case:
        # vLLM itself says so, and that another one is needed.
        assert backend not in (*CUDA, *ROCM) and backend in case["refused"], case
        return
    if backend == "default":
        assert case["served_by"] == FIRST_CHOICE[case["platform"]]
    elif backend in ("ROCM_AITER_FA", "TRITON_ATTN"):
        assert case["served_by"].startswith(("AiterFlash", "Triton")), case
        assert case["served_by"].startswith("Triton") == (backend == "TRITON_ATTN"), case
    assert case["kv_layout"] in ("LBNHC", "LBHNC")
    kv_heads = MODELS[case["model"]][1]
    of_base = case["views"]["1"]
    for tp, views in case["views"].items():
        heads = max(1, kv_heads // int(tp))
        # The same bytes, for each layer.
        assert views == [[blocks * (kv_heads // heads), heads] for blocks, _ in of_base], case


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("platform", "backend"),
    [(one, backend) for one in PLATFORMS for backend in (ROCM if one == "rocm" else CUDA)],
)
def test_served_or_refused(
    lines: list[dict[str, Any]], platform: str, backend: str, runner: str
) -> None:
    cases = of(lines, what="case", platform=platform, backend=backend, runner=runner)
    assert {case["model"] for case in cases} == MODELS.keys()
    for case in cases:
        check(case)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_other_backend_of_this_vllm_is_served_or_named(
    lines: list[dict[str, Any]], platform: str
) -> None:
    """Most are for another kind of KV cache or model, as vLLM itself says."""
    cases = of(lines, what="case", platform=platform)
    others = [case for case in cases if case["backend"] not in (*CUDA, *ROCM)]
    assert "TURBOQUANT" in {case["backend"] for case in others}
    for case in others:
        check(case)


@pytest.mark.parametrize("platform", [*PLATFORMS, *DEFAULTS_ONLY])
def test_a_default_start(lines: list[dict[str, Any]], platform: str) -> None:
    """Where a user has set neither a backend nor the size of blocks."""
    cases = of(lines, what="case", platform=platform, backend="default", model="defaults")
    assert cases
    for case in cases:
        check(case)


def test_a_case_can_see_what_blackwell_does(lines: list[dict[str, Any]]) -> None:
    """FlashInfer's large blocks there: it says other sizes with a config than without."""
    for platform, size in {"sm100": 128, "sm90": 64}.items():
        (case,) = of(
            lines, platform=platform, backend="FLASHINFER", runner="v2", model="large blocks"
        )
        assert case["kernel_blocks"] == [size]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_layout_compiles_for_the_ranges_of_stock_vllm(
    lines: list[dict[str, Any]], platform: str
) -> None:
    ranges = of(lines, what=COMPILE_RANGES, platform=platform)
    assert len(ranges) == len(GIVEN_ENDS) * 4
    for one in ranges:
        check(one)


def test_ranges_differ_by_tp_on_hopper(lines: list[dict[str, Any]]) -> None:
    ranges = of(lines, what=COMPILE_RANGES, platform="sm90", given=None)
    of_stock = [one["of_stock"] for one in ranges]
    assert len({str(one) for one in of_stock}) == 4
    assert [fused for _, fused in of_stock] == [False, True, True, True]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_options_that_cannot_be_served(lines: list[dict[str, Any]], platform: str) -> None:
    options = of(lines, what=OPTIONS, platform=platform)
    assert {one["option"] for one in options} == REFUSED_OPTIONS.keys()
    for one in options:
        check(one)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(lines: list[dict[str, Any]], mistake: str) -> None:
    seen = 0
    for line in of(lines, mistake=mistake):
        try:
            check(line)
        except AssertionError:
            seen += 1
    assert seen, of(lines, mistake=mistake)

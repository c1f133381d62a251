"""What is decided on GPUs' platforms: who serves KV caches, and for which batches is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpuless.matrix import (
    AUTOTUNING,
    COMPILE_RANGES,
    CUDA,
    GIVEN_ENDS,
    IN_8_BITS,
    KV_IN_8_BITS,
    MIXTURE,
    MODELS,
    ROCM,
    RUNNERS,
    SHUFFLED,
    TUNED,
)
from tests.gpuless.platforms import DEFAULTS_ONLY, PLATFORMS
from tests.gpuless.programs import Program, program

Lines = list[dict[str, Any]]

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
OF_8_BITS = {
    **dict.fromkeys(("sm80", "sm89", "sm90", "sm100", "sm103", "sm120"), "FlashInferBackend"),
    **{name: "TritonAttentionBackend" for name, of in FIRST_CHOICE.items() if "Triton" in of},
}
"""With KV in 8 bits; but on sm90 FlashAttention serves e4m3."""
REFUSED = {
    "ROCM_ATTN": ("front end", "attention_backend='ROCM_ATTN'", "TRITON_ATTN"),
    "ROCM_SEGMENTED_ATTN": ("front end", "attention_backend='ROCM_SEGMENTED_ATTN'", "TRITON_ATTN"),
    "B12X": ("front end", "attention_backend='B12X'", "TRITON_ATTN"),
    SHUFFLED: ("worker", "AiterFlashAttentionBackend", "set attention_backend='TRITON_ATTN'"),
}
"""Who refuses, and what the error says: the backend, and the setting that helps."""


matrix = program("matrix", "platform")


@pytest.fixture(scope="module")
def lines(matrix: Program) -> Lines:
    """Answers on the platforms that the module's tests ask for."""
    return [answer for _, answer in matrix.all_of()]


def of(lines: Lines, **wanted: Any) -> Lines:
    """The answers with these values, of which there are some."""
    chosen = [line for line in lines if all(line.get(key) == it for key, it in wanted.items())]
    assert chosen, wanted
    return chosen


def check_case(case: dict[str, Any]) -> None:
    """Whether a KV cache is served, or refused by name."""
    backend = case["backend"]
    assert "failed" not in case, case
    if backend in REFUSED:
        refused_by, *said = REFUSED[backend]
        assert case.get("refused_by") == refused_by, case
        assert all(phrase in case["refused"] for phrase in said), case
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
    check_views(case)


def check_views(case: dict[str, Any]) -> None:
    """Whether blocks of each layout are those of the base layout, divided."""
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
    [(name, backend) for name in PLATFORMS for backend in (ROCM if name == "rocm" else CUDA)],
)
def test_served_or_refused(lines: Lines, platform: str, backend: str, runner: str) -> None:
    cases = of(lines, what="case", platform=platform, backend=backend, runner=runner)
    assert {case["model"] for case in cases} == MODELS.keys()
    for case in cases:
        check_case(case)


@pytest.mark.parametrize("platform", [*PLATFORMS, *DEFAULTS_ONLY])
def test_a_default_start_and_every_other_backend(lines: Lines, platform: str) -> None:
    """Where a user has set neither a backend nor the size of blocks. Most other backends are for
    another kind of KV cache or model, as vLLM itself says."""
    cases = of(lines, what="case", platform=platform)
    assert of(cases, backend="default", model="defaults")
    assert platform in DEFAULTS_ONLY or of(cases, backend="TURBOQUANT")
    for case in cases:
        check_case(case)


@pytest.mark.parametrize("platform", [*PLATFORMS, *DEFAULTS_ONLY])
def test_kv_in_8_bits_is_served(lines: Lines, platform: str) -> None:
    """By what vLLM takes for it, and by Triton."""
    for dtype in IN_8_BITS:
        cases = of(lines, what=KV_IN_8_BITS, platform=platform, kv_cache_dtype=dtype)
        assert {case["backend"] for case in cases} == {"default", "TRITON_ATTN"}
        for case in cases:
            chosen = OF_8_BITS[platform]
            if (platform, dtype) == ("sm90", "fp8"):
                chosen = "FlashAttentionBackend"
            if case["backend"] == "TRITON_ATTN":
                chosen = "TritonAttentionBackend"
            assert case.get("served_by") == chosen, case
            check_views(case)


@pytest.mark.parametrize(("platform", "size"), [("sm100", 128), ("sm90", 64)])
def test_blocks_of_flashinfer(lines: Lines, platform: str, size: int) -> None:
    """Large on Blackwell, where it says other sizes with a config than without."""
    case = {"backend": "FLASHINFER", "runner": "v2", "model": "large blocks"}
    (row,) = of(lines, platform=platform, **case)
    assert row["kernel_blocks"] == [size]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_slows_experts_is_said(lines: Lines, platform: str) -> None:
    (row,) = of(lines, what=MIXTURE, platform=platform)
    *other, untuned = row["lines"]
    assert "tp2dp4 (E=64, N=768)" in untuned and "tp8" not in untuned
    assert (platform == "sm100") == (row["stock"] != "TRITON") == bool(other), row
    assert all(row["stock"] in line for line in other)
    # Experts in fp8: on Hopper vLLM's choice differs between layouts that cut and spread them.
    spread = {"sm80": "MARLIN", "sm90": "FLASHINFER_CUTLASS", "sm100": "FLASHINFER_TRTLLM"}
    chosen = {"sm80": "MARLIN", "sm100": "FLASHINFER_TRTLLM"}.get(platform, "TRITON")
    assert row["fp8"]["spread [128, 128]"] == spread.get(platform, chosen)
    assert row["fp8"]["cut [128, 128]"] == chosen


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_layout_compiles_for_the_ranges_of_stock_vllm(lines: Lines, platform: str) -> None:
    ranges = of(lines, what=COMPILE_RANGES, platform=platform)
    assert len(ranges) == len(GIVEN_ENDS) * 4
    for case in ranges:
        assert case["of_layout"] == case["of_stock"], case
    if platform == "sm90":  # the ranges that are compared differ
        of_stock = [case["of_stock"] for case in ranges if case["given"] is None]
        assert len({str(stock) for stock in of_stock}) == 4
        assert [fused for _, fused in of_stock] == [False, True, True, True]


@pytest.mark.parametrize("platform", TUNED)
def test_kernels_are_tuned_for_each_layout(lines: Lines, platform: str) -> None:
    """By vLLM at start, which copies a layout's config to name the file of its results."""
    cases = of(lines, what=AUTOTUNING, platform=platform)
    assert len(cases) == 4 * 3 * 2 * 2
    for case in cases:
        assert "failed" not in case, case
        keys = [key for key, _ in case["keys"].values()]
        assert len(set(keys)) == len(keys) > 1, case
        assert all(unchanged for _, unchanged in case["keys"].values()), case

"""What is decided on GPUs' platforms: who serves KV caches, and for which batches is compiled."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpuless.matrix import CUDA, GIVEN_ENDS, MODELS, ROCM, RUNNERS, SHUFFLED
from tests.gpuless.platforms import PLATFORMS
from tests.support.child import Child

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
V2_ON_CPU = ROOT / "tests" / "support" / "v2_on_cpu"

FIRST_CHOICE = {
    "sm80": "FlashAttentionBackend",
    "sm90": "FlashAttentionBackend",
    "sm100": "FlashInferBackend",
    "rocm": "TritonAttentionBackend",
}
REFUSED = {"ROCM_ATTN": "ROCM_ATTN", "B12X": "B12X", SHUFFLED: "AiterFlashAttentionBackend"}
"""What its error names, beside the backend that helps."""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the child says, case by case."""
    path = os.pathsep.join([str(V2_ON_CPU), str(ROOT), os.environ.get("PYTHONPATH", "")])
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
    return [json.loads(line) for line in child.output.splitlines() if line[:1] in ("{", "[")]


@pytest.fixture(scope="module")
def cases(lines: list[Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """By platform, backend, runner and model."""
    keys = ("platform", "backend", "runner", "model")
    return {tuple(one[key] for key in keys): one for one in lines if isinstance(one, dict)}


CASES = [
    (platform, backend, runner)
    for platform in PLATFORMS
    for backend in (ROCM if platform == "rocm" else CUDA)
    for runner in RUNNERS
]


@pytest.mark.parametrize(("platform", "backend", "runner"), CASES)
def test_served_or_refused(
    cases: dict[tuple[str, ...], dict[str, Any]], platform: str, backend: str, runner: str
) -> None:
    for model, (_, kv_heads, _) in MODELS.items():
        case = cases[platform, backend, runner, model]
        if backend in REFUSED:
            assert REFUSED[backend] in case["refused"]
            assert "TRITON_ATTN" in case["refused"]
            continue
        assert "refused" not in case, case
        if backend == "default":
            assert case["served_by"] == FIRST_CHOICE[platform]
        assert case["kv_layout"] in ("LBNHC", "LBHNC")
        of_base = case["views"]["1"]
        for tp, views in case["views"].items():
            heads = max(1, kv_heads // int(tp))
            # The same bytes, for each layer.
            assert views == [[blocks * (kv_heads // heads), heads] for blocks, _ in of_base]


def test_a_case_can_see_what_blackwell_does(
    cases: dict[tuple[str, ...], dict[str, Any]],
) -> None:
    """FlashInfer's large blocks there: it says other sizes with a config than without."""
    assert cases["sm100", "FLASHINFER", "v2", "large blocks"]["kernel_blocks"] == [128]
    assert cases["sm90", "FLASHINFER", "v2", "large blocks"]["kernel_blocks"] == [64]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_layout_compiles_for_the_ranges_of_stock_vllm(lines: list[Any], platform: str) -> None:
    seen = 0
    for line in lines:
        if isinstance(line, list) and line[:2] == ["compile ranges", platform]:
            _, _, given, tp, of_layout, of_stock = line
            assert of_layout == of_stock, (given, tp)
            seen += 1
    assert seen == len(GIVEN_ENDS) * 4


def test_ranges_differ_by_tp_on_hopper(lines: list[Any]) -> None:
    ranges = {
        line[3]: line[5]
        for line in lines
        if isinstance(line, list) and line[:3] == ["compile ranges", "sm90", None]
    }
    assert len({str(of_stock) for of_stock in ranges.values()}) == 4
    assert [fused for _, fused in ranges.values()] == [False, True, True, True]

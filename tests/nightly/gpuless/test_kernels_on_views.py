"""vLLM's own Triton kernels take weights that are views: the same numbers, by the same code."""

from __future__ import annotations

import json

from tests.vllm.kernels.triton_kernels import in_interpreter, in_process, needs_triton

pytestmark = needs_triton

PROGRAM = "tests.gpuless.kernels_on_views"


def test_products_with_views_are_those_of_torch() -> None:
    """In the interpreter: cut experts and spread ones, also in fp8, and columns of fp8 matrices,
    whose products are those with copies bit for bit."""
    farthest = json.loads(in_interpreter(PROGRAM).splitlines()[-1])
    assert len(farthest) == 3 and max(farthest.values()) < 2e-4, farthest


def test_views_need_no_other_code_than_copies() -> None:
    """Of Qwen3-30B-A3B's experts and Qwen3-8B's matrices on up to 8 GPUs: strides cost no wide
    access and no register."""
    capabilities = (80, 90, 100)
    printed = in_process(PROGRAM, {"CAPABILITIES": json.dumps(capabilities)})
    counts = json.loads(printed.splitlines()[-1])
    assert [int(capability) for capability in counts] == list(capabilities)
    for num_codes, of_views_only, spills in counts.values():
        assert num_codes > 0 and of_views_only == spills == 0

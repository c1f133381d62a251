"""vLLM's own Triton kernel takes experts that are views: the same numbers, by the same code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.vllm.kernels.triton_kernels import CAPABILITIES, in_interpreter, in_process, needs_triton

pytestmark = [needs_triton, pytest.mark.costly]

PROGRAM = "tests.gpuless.expert_kernels"


def last_line(text: str) -> Any:
    return json.loads(text.splitlines()[-1])


def test_views_give_what_all_experts_give() -> None:
    """In the interpreter: cut and spread experts of the ranks of groups of two and four, in rows
    that traded places; what the ranks make of tokens is, together, what all experts make."""
    assert last_line(in_interpreter(PROGRAM)) < 1e-4


def test_views_need_no_other_code_than_copies() -> None:
    """Of Qwen3-30B-A3B's experts on up to 8 GPUs: strides cost no wide access and no register."""
    found = last_line(in_process(PROGRAM))
    assert found.keys() == {str(one) for one in CAPABILITIES}
    for of_capability in found.values():
        assert of_capability["codes"] > 0
        assert of_capability["of views only"] == of_capability["spills"] == 0

"""vLLM's own Triton kernel takes experts that are views: the same numbers, by the same code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.triton_kernels import CAPABILITIES, in_interpreter, in_process, needs_triton

pytestmark = [needs_triton, pytest.mark.slow]

PROGRAM = "tests.gpuless.expert_kernels"


def last_line(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def test_views_give_what_copies_give() -> None:
    """In the interpreter: cut and spread experts of every rank in groups of two and four.

    And what the ranks of a group make of tokens is, together, what all experts make of them.
    """
    found = last_line(in_interpreter(PROGRAM))
    assert found["launched"] == 2 * 2 * (2 + 4)
    assert found["alike"]
    assert found["worst"] < 1e-4
    assert found["groups"] < 1e-4


def test_views_need_no_other_code_than_copies() -> None:
    """Of Qwen3-30B-A3B's experts on up to 8 GPUs: strides cost no wide access and no register."""
    found = last_line(in_process(PROGRAM))
    assert found.keys() == {str(one) for one in CAPABILITIES}
    for of_capability in found.values():
        assert of_capability["codes"] > 0
        assert of_capability["of views only"] == of_capability["spills"] == 0

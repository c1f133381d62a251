"""Vision-language classes as text models: no tower, and each layout's weights are vLLM's own.

The checkpoints have the weights of the tower, and their own names for those of the text model.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pat_vllm.layout import Layout
from tests.support.vision import torchvision_stub
from tests.vllm.weights.test_weights import check_whole_model


@pytest.fixture(autouse=True)
def classes() -> Iterator[None]:
    with torchvision_stub():
        yield


@pytest.mark.parametrize(
    ("name", "base_tp", "rank"),
    [
        ("gemma3_vl", 1, 1),
        ("qwen2_5_vl", 2, 3),
        ("qwen3_vl", 1, 2),
        ("qwen3_5_vl", 1, 3),
        ("qwen3_5_moe_vl", 2, 1),
    ],
)
def test_a_whole_model(name: str, base_tp: int, rank: int) -> None:
    check_whole_model(name, [Layout.of(tp, 4) for tp in (1, 2, 4) if tp >= base_tp], rank)

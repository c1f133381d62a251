"""Weights of whole models, in the further combinations of models, base layouts and ranks."""

from __future__ import annotations

import pytest

from pat_vllm.layout import Layout
from tests.support.vision import torchvision_stub
from tests.vllm.weights.conftest import current_vllm_config  # noqa: F401
from tests.vllm.weights.test_experts import KINDS, LAYOUTS, MODELS, RANKS
from tests.vllm.weights.test_weights import check_whole_model


@pytest.mark.parametrize("base_tp", [1, 2])
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_few_kv", "qwen3_tied"])
def test_dense_models(name: str, base_tp: int) -> None:
    for rank in range(4):
        check_whole_model(name, [Layout.of(tp, 4) for tp in (1, 2, 4) if tp >= base_tp], rank)


@pytest.mark.parametrize("base_tp", [1, 2])
@pytest.mark.parametrize(
    "name", ["gemma3_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "qwen3_5_moe_vl"]
)
def test_vision_language_models(name: str, base_tp: int) -> None:
    with torchvision_stub():
        for rank in range(4):
            check_whole_model(name, [Layout.of(tp, 4) for tp in (1, 2, 4) if tp >= base_tp], rank)


WAYS = {"both kinds": LAYOUTS} | {
    f"{kind} from two": [Layout.of(tp, RANKS, kind) for tp in (2, 4)] for kind in KINDS
}
"""From a rank that has all of the model, and from one that has half of it."""
REFUSED = ("qwen2_moe", "ep from two")
"""Six experts do not divide among four ranks."""


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in MODELS for way in WAYS if (name, way) != REFUSED]
)
def test_models_with_experts(name: str, way: str) -> None:
    for rank in range(RANKS):
        check_whole_model(name, WAYS[way], rank)

"""Weights of whole models, in the further combinations of models, base layouts and ranks."""

from __future__ import annotations

import pytest

from pat_vllm.layout import Layout
from tests.vllm.weights.conftest import current_vllm_config  # noqa: F401
from tests.vllm.weights.test_experts import KINDS, LAYOUTS, MODELS, RANKS
from tests.vllm.weights.test_weights import check_ranks, check_whole_model

DENSE = ("qwen3", "qwen2", "llama_few_kv", "qwen3_tied")
VISION = ("gemma3_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "qwen3_5_moe_vl")


@pytest.mark.parametrize("base_tp", [1, 2])
@pytest.mark.parametrize("name", [*DENSE, *VISION])
def test_dense_and_vision_language_models(name: str, base_tp: int) -> None:
    check_ranks(name, base_tp, range(4))


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

"""Weights of whole models, in the further combinations of models, base layouts and ranks."""

from __future__ import annotations

from itertools import product

import pytest

from pat_vllm.layout import Experts
from tests.vllm.weights.conftest import current_vllm_config  # noqa: F401
from tests.vllm.weights.test_experts import KINDS, LAYOUTS, MODELS, RANKS
from tests.vllm.weights.test_weights import check_ranks, check_whole_model

DENSE = ("qwen3", "qwen2", "llama_few_kv", "qwen3_tied")
VISION = ("gemma3_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl", "qwen3_5_moe_vl")


@pytest.mark.parametrize("base_tp", [1, 2])
@pytest.mark.parametrize("name", [*DENSE, *VISION])
def test_dense_and_vision_language_models(name: str, base_tp: int) -> None:
    check_ranks(name, base_tp, range(4))


REFUSED = ("qwen2_moe", "ep", 2)
"""Six experts do not divide among four ranks, where a rank of the base layout has half of them."""


@pytest.mark.parametrize(
    ("name", "kind", "base_tp"),
    [case for case in product(MODELS, KINDS, (1, 2)) if case != REFUSED],
)
def test_models_with_experts(name: str, kind: Experts, base_tp: int) -> None:
    """From a rank that has all of the model, and from one that has half of it."""
    for rank in range(RANKS):
        check_whole_model(name, [layout for layout in LAYOUTS if layout.tp >= base_tp], rank, kind)

"""The tests of switches on many engines: models, ranks, ways to hold weights, kinds of experts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.specs import (
    COPIES,
    FEW_KV_HEADS,
    FOUR_RANKS,
    IN_PLACE,
    MIXTURE,
    SPREAD_MIXTURE,
    WHOLE_PROMPTS,
    WITHOUT_CACHE,
)
from tests.engine.test_switch import (  # noqa: F401
    case,
    test_a_layout_asked_for_after_a_batch_holds_for_the_next,
    test_an_idle_engine_returns_to_its_base_layout,
    test_every_ordered_pair_of_layouts,
    test_half_prefilled_and_waiting_requests_are_carried,
    test_one_group_is_a_stock_engine,
    test_random_switch_storm,
    test_recomputing_gives_the_same,
    test_single_layouts_agree_and_differ_by_request,
    test_teacher_forced_log_probabilities_after_a_switch,
    test_the_layouts_take_the_memory_of_one,
    test_the_next_turn_finds_its_kv_after_a_switch,
    test_what_moves_is_what_requests_hold,
)
from tests.support.pool import EngineSpec


def switching(
    model: str, ranks: int, runner: int = 1, cached: bool = True, **pat: Any
) -> EngineSpec:
    """An engine for these tests, which count steps: with V2, too, one of them is in flight."""
    name = "-".join([model, str(ranks), *map(str, pat.values()), *["v2"] * (runner == 2)])
    return EngineSpec(
        name,
        model,
        ranks,
        IN_PLACE | pat,
        WHOLE_PROMPTS if cached else WITHOUT_CACHE,
        model_runner_v2=runner == 2,
        without_async_scheduling=runner == 2,
    )


GROUPED = switching("qwen2", 2)
COPIED_MIXTURES = [
    *(switching("qwen3_moe", ranks, weights="materialized") for ranks in (2, 4)),
    switching("gpt_oss", 2, weights="materialized"),
    switching("deepseek_v3", 2, weights="materialized"),
]
# Of these a request holds the last blocks only.
WINDOWS = [
    switching("gemma3", 2),
    switching("gemma2", 2),
    switching("mistral", 2),
    switching("phi3", 2),
    switching("llama4", 2),  # chunks
    switching("gpt_oss", 2, experts="ep"),  # sinks, and experts with biases
    switching("gpt_oss", 4),
]
IN_PLACE_ENGINES = [
    MIXTURE,
    SPREAD_MIXTURE,
    FOUR_RANKS,
    FEW_KV_HEADS,
    switching("qwen3_moe", 4),
    switching("qwen3_moe", 4, experts="ep"),
    GROUPED,
    switching("llama_gqa", 2),
    switching("qwen3_tied", 2),
    *WINDOWS,
    # With shared experts, which are always cut, and six over four ranks.
    switching("qwen2_moe", 2),
    switching("qwen2_moe", 4, experts="ep"),
    # Names, norms and routers of their own.
    switching("mixtral", 2),
    switching("olmoe", 2, experts="ep"),
    switching("glm4_moe", 2, experts="ep"),
    # Latent attention; queries that are not compressed.
    switching("deepseek_v3", 4, experts="ep"),
    switching("deepseek_v2", 2),
    # Linear attention, whose prompts the cache cuts in parts, which V1 cannot have seeded on CPU;
    # with one KV head for two ranks, so that slots are padded at tp=4.
    switching("qwen3_next", 2, cached=False, experts="ep"),
    switching("qwen3_next", 2, runner=2),
    switching("qwen3_next_few_kv", 4, cached=False),
    switching("qwen3_next_few_kv", 4, cached=False, base_tp=2, experts="ep"),
    switching("qwen3_5_vl", 2, cached=False),
    # Mamba2; with slots that are padded.
    switching("nemotron_h", 2, cached=False),
    switching("nemotron_h", 2, runner=2),
    switching("nemotron_h_few_kv", 4, cached=False),
    switching("qwen3_5_moe_vl", 4, cached=False),
    # No rank has an expert whole, or all experts.
    switching("qwen3_moe", 4, base_tp=2),
    switching("qwen3_moe", 4, base_tp=2, experts="ep"),
    switching("qwen2", 2, runner=2),
    switching("gemma3", 2, runner=2),
    switching("llama_few_kv", 4, runner=2, base_tp=2),
    switching("qwen3_moe", 2, runner=2, experts="ep"),
    switching("gpt_oss", 2, runner=2),
    # Weights in fp8, taken apart in 32 bits; at tp=4 experts' shards end inside blocks of scales.
    switching("fp8_moe_blocks", 4),
    switching("fp8_moe_blocks", 2, experts="ep"),
    switching("fp8_latent_blocks", 2),
    switching("fp8_blocks", 2, runner=2),
]
pytestmark = pytest.mark.engine(*IN_PLACE_ENGINES, COPIES, *COPIED_MIXTURES)
ENGINES = {
    "test_the_layouts_take_the_memory_of_one": IN_PLACE_ENGINES,
    "test_one_group_is_a_stock_engine": [GROUPED],
    "test_the_next_turn_finds_its_kv_after_a_switch": [SPREAD_MIXTURE, FOUR_RANKS, COPIES],
    "test_what_moves_is_what_requests_hold": WINDOWS,
}

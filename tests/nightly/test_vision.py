"""Vision-language classes as text models: the tests of switches and of updates on each of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.specs import IN_PLACE, MIGRATE, UPDATES, VISION, WHOLE_PROMPTS
from tests.engine.test_switch import (  # noqa: F401
    case,
    test_every_ordered_pair_of_layouts,
    test_half_prefilled_and_waiting_requests_are_carried,
    test_random_switch_storm,
    test_recomputing_gives_the_same,
    test_storm_of_trajectories,
    test_teacher_forced_log_probabilities_after_a_switch,
    test_the_next_turn_finds_its_kv_after_a_switch,
    test_what_moves_is_what_requests_hold,
)
from tests.engine.test_vision import (  # noqa: F401
    test_a_class_says_what_its_text_model_says,
    test_an_image_is_refused_and_nothing_is_lost,
)
from tests.engine.test_weight_updates import (  # noqa: F401
    test_an_update_reaches_every_layout,
    test_nothing_that_happens_between_two_batches_leaves_stale_weights,
    updated,
)
from tests.support.pool import EngineSpec

CLASSES = ("gemma3_vl", "qwen2_5_vl", "qwen3_vl")
# Of windows, as in `WINDOWS`; of others vLLM refuses it.
OPTIONS: dict[str, dict[str, Any]] = {
    model: WHOLE_PROMPTS | ({"prefix_cache_retention_interval": 32} if model == "gemma3_vl" else {})
    for model in CLASSES
}


def copied(model: str) -> EngineSpec:
    """Packed for vLLM's CPU kernels, which round less."""
    pat = MIGRATE | {"weights": "materialized"}
    return EngineSpec(f"{model} copies", model, 2, pat, OPTIONS[model])


def in_place(model: str, ranks: int, **options: Any) -> EngineSpec:
    """With plain weights, which can be updated."""
    name = " ".join([model, str(ranks), *options])
    return EngineSpec(name, model, ranks, IN_PLACE, UPDATES | OPTIONS[model], **options)


COPIES = [copied(model) for model in CLASSES]
UPDATED = [VISION, in_place("gemma3_vl", 2), in_place("qwen3_vl", 4)]
V2 = [
    in_place(model, 2, model_runner_v2=True, without_async_scheduling=True)
    for model in ("gemma3_vl", "qwen3_vl")
]
pytestmark = pytest.mark.engine(*COPIES, *UPDATED, *V2)
ENGINES = {
    # V2 draws other tokens of a seed than the stock engine's V1.
    "test_a_class_says_what_its_text_model_says": [*COPIES, *UPDATED],
    "test_what_moves_is_what_requests_hold": [*COPIES, *UPDATED],
    "test_an_image_is_refused_and_nothing_is_lost": COPIES,
    "test_an_update_reaches_every_layout": [*UPDATED, *V2],
    "test_nothing_that_happens_between_two_batches_leaves_stale_weights": UPDATED,
}

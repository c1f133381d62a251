"""Weight updates on further engines: copies over four ranks, Model Runner V2."""

from __future__ import annotations

import pytest

from tests.engine.specs import (
    FOUR_RANKS,
    FP8,
    IN_PLACE,
    LATENT,
    LINEAR,
    MIGRATE,
    MIXTURE,
    SPREAD,
    SPREAD_MIXTURE,
    UPDATES,
    V2,
    WHOLE_PROMPTS,
)
from tests.engine.test_updates_under_way import check_storm
from tests.engine.test_weight_updates import (  # noqa: F401
    Updated,
    test_an_update_between_sleep_and_waking_up,
    test_an_update_reaches_every_layout,
    test_an_update_under_way_is_as_in_stock_vllm,
    test_methods_that_change_the_model_run_in_every_layout,
    test_nothing_that_happens_between_two_batches_leaves_stale_weights,
    test_what_happens_in_an_update_by_layers,
    updated,
)
from tests.support.pool import EngineSpec

OPTIONS = UPDATES | WHOLE_PROMPTS
COPIES = EngineSpec("four copies", "qwen3", 4, MIGRATE | {"weights": "materialized"}, OPTIONS)
RUNNER_V2 = EngineSpec(
    "four, V2",
    "qwen3",
    4,
    MIGRATE | {"weights": "inplace"},
    OPTIONS,
    model_runner_v2=True,
    without_async_scheduling=True,
)
FP8_V2 = EngineSpec(
    "fp8, V2",
    "fp8_blocks",
    2,
    IN_PLACE,
    OPTIONS,
    model_runner_v2=True,
    without_async_scheduling=True,
)
# Windows, sinks, experts with biases: weights that its own `load_weights` cuts.
GPT_OSS = EngineSpec("gpt-oss", "gpt_oss", 2, IN_PLACE | SPREAD, OPTIONS)
pytestmark = pytest.mark.engine(COPIES, RUNNER_V2, GPT_OSS, FP8_V2)
ENGINES = {
    "test_long_storm": [
        *(FOUR_RANKS, MIXTURE, SPREAD_MIXTURE, COPIES, RUNNER_V2, V2, GPT_OSS, LATENT, LINEAR),
        *(FP8, FP8_V2),
    ],
    "test_an_update_between_sleep_and_waking_up": [COPIES, RUNNER_V2, FP8],
} | {
    test: [COPIES, RUNNER_V2]
    for test in (
        "test_an_update_under_way_is_as_in_stock_vllm",
        "test_methods_that_change_the_model_run_in_every_layout",
        "test_what_happens_in_an_update_by_layers",
    )
}


@pytest.mark.parametrize("seed", range(3))
def test_long_storm(updated: Updated, seed: int) -> None:  # noqa: F811
    """Of updates and switches, while requests run."""
    check_storm(updated, seed, count=24)

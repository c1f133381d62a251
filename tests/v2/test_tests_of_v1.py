"""Tests of engines with Model Runner V1, on such with V2, scheduled one step at a time as on CPU.

They count engine steps, so that asynchronous scheduling would not do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.test_switch import make_case

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

MODELS = [("qwen2", 2, 1), ("llama_few_kv", 4, 2), ("qwen3_moe", 2, 1)]
"""Model, ranks, base layout's tp."""


@pytest.fixture(scope="module", params=MODELS, ids=str)
def case(request: pytest.FixtureRequest, runner_v2: None) -> Iterator[Any]:
    model, ranks, base_tp = request.param
    with make_case(model, ranks, base_tp=base_tp, weights="inplace") as case:
        config = case[0].llm_engine.vllm_config
        assert config.use_v2_model_runner and not config.scheduler_config.async_scheduling
        yield case


from tests.test_switch import (  # noqa: E402, F401
    test_a_layout_asked_for_after_a_batch_holds_for_the_next,
    test_an_idle_engine_returns_to_its_base_layout,
    test_every_ordered_pair_of_layouts,
    test_half_prefilled_and_waiting_requests_are_carried,
    test_random_switch_storm,
    test_recomputing_gives_the_same,
    test_single_layouts_agree_and_differ_by_request,
    test_teacher_forced_log_probabilities_after_a_switch,
    test_the_layouts_take_the_memory_of_one,
)

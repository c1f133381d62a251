"""Tests of weight updates with Model Runner V1, on engines with V2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import engine, run
from tests.test_weight_updates import NEW, OLD, PLAIN, batch, updated_under_way

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture(scope="module")
def expected(runner_v2: None) -> dict[str, Any]:
    """What stock vLLM generates with each of the weights, and with both, on V2, too."""
    outcomes = {}
    for model in (NEW, OLD):
        # Two ranks: an engine of one would run in this process, where there is no interpreter.
        with engine(model, 2, None, **PLAIN) as llm:
            assert llm.llm_engine.vllm_config.use_v2_model_runner
            outcomes[model] = run(llm, batch())
            if model == OLD:
                outcomes["under way"] = updated_under_way(llm, {})
    assert outcomes[OLD] != outcomes[NEW]
    return outcomes


@pytest.fixture(scope="module")
def llm(runner_v2: None) -> Iterator[Any]:
    with engine(OLD, 4, {"kv_transfer": "migrate", "weights": "inplace"}, **PLAIN) as llm:
        yield llm


from tests.test_weight_updates import (  # noqa: E402, F401
    test_an_update_between_sleep_and_waking_up,
    test_an_update_reaches_every_layout,
    test_an_update_under_way_is_as_in_stock_vllm,
    test_methods_that_change_the_model_run_in_every_layout,
    test_nothing_that_happens_between_two_batches_leaves_stale_weights,
)

"""Drafts with Model Runner V2 of dense models: one step in flight, four ranks, long storms."""

from __future__ import annotations

import pytest

from tests.engine.specs import IN_PLACE, V2_DRAFTS, V2_NGRAM
from tests.engine.test_weight_updates import sleep_with_new_weights
from tests.engine.v2 import test_drafts
from tests.engine.v2.batch import Served, run_static, serve, sizes_of
from tests.engine.v2.test_drafts import (  # noqa: F401
    SAMPLED,
    greedy_jobs,
    longest,
    repeating,
    run_at,
    served,
    test_buffers_are_as_computed,
    test_grammars_see_the_drafts,
    test_greedy_tokens_are_the_models_own,
    test_steps_without_drafts_look_for_none,
)
from tests.support.pool import EnginePool, EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same

# "ngram" has one step in flight, as vLLM runs it.
SYNCHRONOUS = EngineSpec(
    "V2 drafts, synchronous",
    "repeating",
    2,
    IN_PLACE,
    {**V2_DRAFTS.options, "speculative_config": V2_NGRAM | {"method": "ngram"}},
    model_runner_v2=True,
    without_async_scheduling=True,
)
FOUR = EngineSpec(
    "V2 drafts, four", "repeating", 4, IN_PLACE, V2_DRAFTS.options, model_runner_v2=True
)
WITHOUT = EngineSpec(
    "V2, two, dense",
    "repeating",
    2,
    IN_PLACE,
    {name: value for name, value in V2_DRAFTS.options.items() if name != "speculative_config"},
    model_runner_v2=True,
)
pytestmark = pytest.mark.engine(SYNCHRONOUS, FOUR)
ENGINES = {"test_without_drafts_an_engine_is_one_that_never_speculates": [FOUR]}


@pytest.mark.parametrize("way_of_kv", ["migrate", "recompute"])
def test_every_ordered_pair_of_layouts(served: Served, way_of_kv: str) -> None:  # noqa: F811
    test_drafts.test_every_ordered_pair_of_layouts(served, way_of_kv)


@pytest.mark.parametrize("copies", [1, 8])
def test_storm(served: Served, copies: int) -> None:  # noqa: F811
    test_drafts.test_storm(served, copies)


def test_new_weights_come_while_the_engine_sleeps(
    served: Served,  # noqa: F811
    spec: EngineSpec,
) -> None:
    """Drafts are verified by them in every layout."""
    llm, jobs = served.llm, greedy_jobs(served)
    old = "qwen3_moe" if "moe" in spec.model else "qwen3"
    try:
        sleep_with_new_weights(llm, f"{old}_updated")
        static = run_static(llm, jobs)
        assert static["greedy"].token_ids != served.static["greedy"].token_ids
        for name in sizes_of(llm):
            assert_same(run_at(llm, jobs, longest, name), static, PLAIN_TOLERANCE)
    finally:
        go_home(llm)
        sleep_with_new_weights(llm, spec.model)
    expected = {name: served.static[name] for name in jobs}
    assert_same(run_at(llm, jobs, longest, sizes_of(llm)[-1]), expected, PLAIN_TOLERANCE)


def test_seeds_give_the_same_where_drafts_are_the_same(served: Served) -> None:  # noqa: F811
    jobs = {name: served.jobs[name] for name in ("allowed", "min_p", "penalties")}
    first, second = (run_at(served.llm, jobs, longest) for _ in range(2))
    assert_same(first, second, PLAIN_TOLERANCE)


def test_without_drafts_an_engine_is_one_that_never_speculates(
    spec: EngineSpec, engines: EnginePool
) -> None:
    served = serve(engines.get(spec), repeating, SAMPLED)  # noqa: F811
    try:
        outcomes = run_static(engines.get(WITHOUT), served.jobs)
        assert_same(outcomes, served.static, PLAIN_TOLERANCE, SAMPLED)
    finally:
        engines.close()

"""Every ordered pair of layouts with Model Runner V2, CUDA's default, and asynchronous scheduling.

What is generated across switches, updates and sleep must be what one layout generates,
log-probabilities included.
"""

from __future__ import annotations

import random

import pytest

import pat_vllm
from tests.engine.specs import V2, V2_LATENT
from tests.engine.test_weight_updates import NEW, OLD, sleep_with_new_weights, update
from tests.engine.v2.batch import (
    MIN_TOKENS,
    STOP,
    Served,
    check_storm,
    check_tour,
    run_static,
    sizes_of,
)
from tests.support.counting import assert_counted
from tests.support.null_blocks import spoil_null_blocks
from tests.support.pool import go_home

pytestmark = pytest.mark.engine(V2)
ENGINES = {
    "test_every_ordered_pair_of_layouts": [V2, V2_LATENT],
    "test_null_blocks_are_clear_after_a_switch": [V2, V2_LATENT],
}


def test_every_ordered_pair_of_layouts(served: Served) -> None:
    assert served.asynchronous
    static = served.static
    assert static["greedy"].text.startswith(static["stop string"].text)
    assert len(static["min_tokens"].token_ids) == MIN_TOKENS + 1
    assert STOP not in static["min_tokens"].token_ids[:-1]
    assert set(static["allowed"].token_ids) <= set(range(40, 60))
    assert len(set(static["penalties"].token_ids)) > 12
    for place in ("dict", "array"):
        assert_counted(static[f"counted in {place}"].token_ids)
    assert static["unseeded"].token_ids != static["unseeded again"].token_ids
    check_tour(served)


def test_every_ordered_pair_when_kv_is_computed_again(served: Served) -> None:
    check_tour(served.few(), way_of_kv="recompute")


def test_null_blocks_are_clear_after_a_switch(served: Served) -> None:
    """The layout before had requests' blocks there. And no step reads them: NaN changes nothing."""
    clear: list[bool] = []
    check_tour(served.few(), at_switch=lambda _: clear.append(spoil_null_blocks(served.llm)))
    assert clear and all(clear)
    assert pat_vllm.switch(served.llm, tp=sizes_of(served.llm)[-1])  # the way home clears it


@pytest.mark.parametrize("copies", [1])
def test_storm(served: Served, copies: int) -> None:
    switches = check_storm(served, copies, spread=40)
    assert sum(switch.migrated for switch in switches) > 10 * copies
    assert sum(switch.recomputed for switch in switches) > 5 * copies


def test_an_update_between_switches_reaches_every_layout(served: Served) -> None:
    """New weights come in the widest layout, and the old ones again in the default layout."""
    llm, few = served.llm, served.few()
    widest = sizes_of(llm)[-1]
    assert pat_vllm.switch(llm, tp=widest)
    update(llm, NEW)
    assert pat_vllm.report(llm).layout.tp == widest
    try:
        static = run_static(llm, few.jobs)
        assert all(
            outcome.token_ids != few.static[name].token_ids for name, outcome in static.items()
        )
        check_tour(Served(llm, few.jobs, static, few.sampled))
    finally:
        go_home(llm)
        update(llm, OLD)
    check_tour(few)


def test_sleep_and_wake_up_around_switches(served: Served) -> None:
    """Requests stay while the engine sleeps without their memory, after each switch of a tour."""
    llm = served.llm
    rng = random.Random(1)

    def sleep(tp: int) -> None:
        llm.sleep(level=1, mode="keep")
        assert llm.llm_engine.is_sleeping()
        other = rng.choice([other for other in sizes_of(llm) if other != tp])
        assert not pat_vllm.switch(llm, tp=other)
        llm.wake_up()
        assert pat_vllm.report(llm).layout.tp == tp

    check_tour(served.few(), at_switch=sleep)


def test_new_weights_come_while_the_engine_sleeps(served: Served) -> None:
    """At level 2 it has none: those that are loaded then are what every layout gets."""
    assert pat_vllm.switch(served.llm, tp=sizes_of(served.llm)[-1])
    sleep_with_new_weights(served.llm, OLD)
    check_tour(served.few())

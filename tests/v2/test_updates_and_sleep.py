"""New weights between switches; sleeping and waking up around them."""

from __future__ import annotations

from typing import Any

import pytest

import pat_vllm
from tests.test_weight_updates import NEW, OLD, load_all, update
from tests.v2.batch import Served, check_tour, few, refresh, run_static

pytestmark = pytest.mark.slow


def test_an_update_between_switches_reaches_every_layout(served: Served, llm: Any) -> None:
    """New weights come in the widest layout, and the old ones again in the base layout."""
    jobs = few(served.jobs)
    widest = pat_vllm.report(llm).layouts[-1].tp
    assert pat_vllm.switch(llm, tp=widest)
    update(llm, NEW)
    assert pat_vllm.report(llm).layout.tp == widest
    try:
        static = run_static(llm, jobs)
        assert all(one.token_ids != served.static[name].token_ids for name, one in static.items())
        check_tour(llm, jobs, static)
    finally:
        refresh(llm)
        update(llm, OLD)
    check_tour(llm, jobs, few(served.static))


def test_sleep_and_wake_up_around_switches(served: Served, llm: Any) -> None:
    """Requests stay while the engine sleeps without their memory, after each switch of a tour."""

    def sleep(tp: int) -> None:
        llm.sleep(level=1, mode="keep")
        assert llm.llm_engine.is_sleeping()
        other = next(one.tp for one in pat_vllm.report(llm).layouts if one.tp != tp)
        assert not pat_vllm.switch(llm, tp=other)
        llm.wake_up()
        assert pat_vllm.report(llm).layout.tp == tp

    check_tour(llm, few(served.jobs), few(served.static), at_switch=sleep)


def test_new_weights_come_while_the_engine_sleeps(served: Served, llm: Any) -> None:
    """At level 2 it has none: those that are loaded then are what every layout gets."""
    assert pat_vllm.switch(llm, tp=pat_vllm.report(llm).layouts[-1].tp)
    llm.sleep(level=2)
    llm.collective_rpc("lose_weights")
    llm.wake_up(["weights"])
    load_all(llm, OLD)
    llm.wake_up(["kv_cache"])
    check_tour(llm, few(served.jobs), few(served.static))

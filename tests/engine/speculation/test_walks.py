"""Greedy requests through switches and pauses give what stock vLLM gives without speculation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import DRAFTS
from tests.engine.speculation.batch import (
    batch,
    check_storm,
    take_way,
    without_drafts,
)
from tests.engine.speculation.in_workers import count_calls, count_no_more, take_calls
from tests.engine.speculation.steps import held_drafts, watched
from tests.support.draft_prints import alike
from tests.support.engines import run
from tests.support.same import assert_same
from tests.vllm.scheduler.protocol import MOST

pytestmark = pytest.mark.engine(DRAFTS)


def test_switches_inside_runs_of_right_drafts(llm: Any) -> None:
    """The draft length changes before each step."""
    take_way(llm, [1, 2, 1, 2], batch(), without_drafts())


def test_switches_while_drafts_are_verified(llm: Any) -> None:
    take_way(llm, [2, 1, 2], batch(), without_drafts(), in_flight=True)


def test_storm(llm: Any) -> None:
    with alike(llm):
        check_storm(llm, without_drafts(), copies=2)


def test_a_request_is_given_up_while_the_engine_sleeps(llm: Any) -> None:
    """The others wake up with their own drafts."""
    assert pat_vllm.switch(llm, tp=2)
    pat_vllm.speculate(llm, MOST)
    given_up = False

    def before_step(step: int) -> None:
        nonlocal given_up
        if step > 4 and not given_up and len(held_drafts(llm)) >= 4:
            given_up = True
            llm.sleep(level=0, mode="keep")
            llm.llm_engine.abort_request(["r1"])
            for _ in range(3):
                assert not llm.llm_engine.step()
            llm.wake_up(tags=["scheduling"])

    with watched(MOST) as watch:
        outcomes = run(llm, batch(), before_step=before_step)
    assert given_up and watch.silent
    expected = without_drafts()
    del expected["r1"]
    assert_same(outcomes, expected)


def test_steps_without_drafts_neither_draft_nor_verify(llm: Any) -> None:
    """With draft length 0 neither the drafter nor the rejection sampler is called."""
    before: list[Counter[str]] = []

    def before_step(step: int) -> None:
        if step in (0, 14, 20):
            assert pat_vllm.switch(llm, tp=2 if step == 14 else 1)
        if step in (0, 8):
            pat_vllm.speculate(llm, MOST if step == 0 else 0)
        if step == 13:  # the last drafts are verified, though replicas step by themselves
            before.append(take())

    def take() -> Counter[str]:
        return sum(llm.collective_rpc(take_calls), Counter())

    llm.collective_rpc(count_calls)
    try:
        outcomes = run(llm, batch(), before_step=before_step)
        (with_drafts,), without = before, take()
    finally:
        llm.collective_rpc(count_no_more)
    assert_same(outcomes, without_drafts())
    assert min(with_drafts[name] for name in ("propose", "forward", "_sample")) > 2, with_drafts
    assert set(without) == {"_sample"} and without["_sample"] > 20, without

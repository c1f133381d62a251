"""Mistakes in speculating across switches and pauses, each of which a check sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import pat_vllm
from tests.engines import Outcome, run
from tests.speculation.batch import assert_same, batch, leave_clean, take_way
from tests.speculation.in_workers import (
    count_calls,
    count_no_more,
    draft_as_pat,
    draft_as_vllm,
    take_calls,
)
from tests.speculation.steps import MOST, held_drafts, watched
from tests.v2.mistakes import Mistake, made

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean")]

Check = Callable[[Any, dict[str, Outcome]], None]


def check_walk(llm: Any, static: dict[str, Outcome]) -> None:
    """There and back, inside runs of right drafts."""
    take_way(llm, [1, 2, 1, 2], batch(), static)


def check_walk_in_flight(llm: Any, static: dict[str, Outcome]) -> None:
    """There and back, while drafts are verified."""
    take_way(llm, [2, 1, 2], batch(), static, in_flight=True)


def check_walk_with_one_length(llm: Any, static: dict[str, Outcome]) -> None:
    """There and back, always with one draft."""
    take_way(llm, [1, 2, 1], batch(), static, lengths=(1,))


def check_pause(llm: Any, static: dict[str, Outcome]) -> None:
    """A request is given up while the engine sleeps; the others wake up with their own drafts."""
    jobs = batch()
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
        found = run(llm, jobs, before_step=before_step)
    assert given_up and watch.silent
    assert_same(found, {name: one for name, one in static.items() if name != "r1"})


def check_nothing_is_drafted(llm: Any, static: dict[str, Outcome]) -> None:
    """With draft length 0 neither the drafter nor the rejection sampler is called."""
    seen = []

    def before_step(step: int) -> None:
        if step in (0, 14, 20):
            assert pat_vllm.switch(llm, tp=2 if step == 14 else 1)
        if step in (0, 8):
            pat_vllm.speculate(llm, MOST if step == 0 else 0)
        if step == 13:  # the last drafts are verified, though replicas step by themselves
            seen.append(take(llm))

    def take(llm: Any) -> Any:
        every = llm.collective_rpc(take_calls)
        return sum(every[1:], every[0])

    llm.collective_rpc(count_calls)
    try:
        found = run(llm, batch(), before_step=before_step)
        (with_drafts,), without = seen, take(llm)
    finally:
        llm.collective_rpc(count_no_more)
    assert_same(found, static)
    assert min(with_drafts[name] for name in ("propose", "forward", "_sample")) > 2, with_drafts
    assert set(without) == {"_sample"} and without["_sample"] > 20, without


@pytest.mark.parametrize(
    "check",
    [
        check_walk,
        check_walk_in_flight,
        check_walk_with_one_length,
        check_pause,
        check_nothing_is_drafted,
    ],
)
def test_as_without_speculation(check: Check, llm: Any, static: dict[str, Outcome]) -> None:
    check(llm, static)


def in_core(function: str, changes: dict[str, str]) -> Mistake:
    return Mistake("pat_vllm.scheduler." + function, changes, in_workers=False)


MISTAKES: dict[str, tuple[Check, Mistake]] = {
    "drafts are kept at a switch": (
        check_walk,
        in_core("switch:_rewind", {"request.spec_token_ids = []": "pass"}),
    ),
    "accepted tokens are dropped at a switch": (
        check_walk_in_flight,
        in_core(
            "replica_set:ReplicaSet.drain",
            {
                "self.finish(self.executor.finished(wait_for_all=True))": """\
results = self.executor.finished(wait_for_all=True)
    for one in results:
        for tokens in one.output.sampled_token_ids:
            del tokens[1:]
    self.finish(results)"""
            },
        ),
    ),
    "drafts come to another replica": (
        check_walk,
        in_core(
            "replica_set:ReplicaSet.finish",
            {
                "self._collect(replica.finish(result.output, result.drafts))": """\
self._collect(replica.finish(result.output, None))
        if result.drafts is not None:
            other = self.replicas[result.replica - 1]
            other.scheduler.update_draft_token_ids(result.drafts)"""
            },
        ),
    ),
    "a new layout's schedulers have their own draft length": (
        check_walk_with_one_length,
        in_core(
            "speculation:DraftLengths.write",
            {"self._written == (requested, of_policy, replicas)": "self._written[0] == requested"},
        ),
    ),
    "draft length 0 is none": (
        check_walk,
        in_core("speculation:DraftLengths._table", {"requested is not None": "requested"}),
    ),
    "a step without tokens sends the drafts of the step before": (
        check_pause,
        Mistake(
            "pat_vllm.executor.lanes:WorkerLanes.serve",
            {
                "output = worker.execute_model(payload)": "output = worker.execute_model(payload); "
                "drafts = worker.drafts_of_step(constrained=False)"
            },
        ),
    ),
}


@pytest.mark.nightly  # `test_scheduler.py` and `test_lane.py` see them without an engine
@pytest.mark.parametrize("name", MISTAKES)
def test_checks_see(name: str, llm: Any, static: dict[str, Outcome]) -> None:
    check, mistake = MISTAKES[name]
    try:
        with made(llm, mistake), pytest.raises(AssertionError):
            check(llm, static)
    finally:
        leave_clean(llm)


@contextmanager
def drafting_as_vllm(llm: Any) -> Iterator[None]:
    llm.collective_rpc(draft_as_vllm)
    try:
        yield
    finally:
        llm.collective_rpc(draft_as_pat)


@pytest.mark.nightly  # as does `test_runner_patches.py`
def test_checks_see_that_draft_length_0_drafts(llm: Any, static: dict[str, Outcome]) -> None:
    with drafting_as_vllm(llm), pytest.raises(AssertionError, match="propose"):
        check_nothing_is_drafted(llm, static)

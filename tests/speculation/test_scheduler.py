"""The scheduler of schedulers with drafts, without workers."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from benchmarks.without_workers import answer, engine_config, request
from pat_vllm.executor.executor import StepResult
from pat_vllm.scheduler import switch as switch_module
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.scheduler.switch import PlanningFailed
from tests.speculation.steps import SPECULATIVE
from tests.support.mutation import mutated


def make(policy: dict[str, Any] | None = None, **speculative: Any) -> Any:
    """For eight ranks, in the layout tp8dp1."""
    config, stock = engine_config(
        8, num_blocks=80, policy=policy, speculative_config=SPECULATIVE | speculative
    )
    return PATScheduler(vllm_config=config, **stock)


def step(scheduler: Any, drafts: list[int]) -> set[int]:
    """A step in which each request gets these drafts; the draft lengths it asks for."""
    output = scheduler.schedule()
    results = [
        StepResult(i, answer(one), 0.01, proposed(one, drafts)) for i, one in output.steps.items()
    ]
    scheduler.update_from_output(output, results)
    return {one.num_spec_tokens_to_schedule for one in output.steps.values()}


def proposed(step: Any, drafts: list[int]) -> DraftTokenIds | None:
    names = list(step.num_scheduled_tokens)
    return DraftTokenIds(names, [list(drafts) for _ in names]) if drafts and names else None


def drafts_of(scheduler: Any) -> list[list[int]]:
    return [
        one.spec_token_ids
        for replica in scheduler.replica_set.replicas
        for one in replica.scheduler.requests.values()
    ]


def with_requests(scheduler: Any, number: int = 4) -> Any:
    for i in range(number):
        scheduler.add_request(request(f"r{i}", i))
    return scheduler


def test_draft_lengths_by_the_policys_layout() -> None:
    policy = {"kind": "schedule", "switch_at": {"1": 8}, "num_speculative_tokens": {1: 0, 2: 2}}
    scheduler = with_requests(make(policy))
    for tp, length in ((1, 0), (2, 2), (8, 4), (1, 0)):
        assert scheduler.controller.request(tp)
        for _ in range(2):
            assert step(scheduler, []) == {length}
    scheduler.controller.drafts.request(1)
    assert step(scheduler, []) == {1}
    assert scheduler.controller.request(8)
    assert step(scheduler, []) == {1}


def test_draft_lengths_by_the_users_schedule() -> None:
    """By the number of requests in a step of a replica, in each layout."""
    scheduler = with_requests(make(num_speculative_tokens_per_batch_size=[(1, 2, 4), (3, 256, 1)]))
    assert step(scheduler, []) == {1}
    assert scheduler.controller.request(2)  # four replicas, a request in each
    assert step(scheduler, []) == {4}


def check_a_switch_drops_drafts() -> None:
    scheduler = with_requests(make())
    step(scheduler, [7, 7])
    assert drafts_of(scheduler) == [[7, 7]] * 4
    assert scheduler.controller.request(2)
    assert drafts_of(scheduler) == [[]] * 4


def test_a_switch_drops_drafts() -> None:
    check_a_switch_drops_drafts()
    with (
        mutated(switch_module._rewind, {"request.spec_token_ids = []": "pass"}),
        pytest.raises(AssertionError),
    ):
        check_a_switch_drops_drafts()


def check_a_failed_plan_gives_drafts_back() -> None:
    scheduler = with_requests(make())
    step(scheduler, [7, 7])

    def no_plan(*args: Any) -> None:
        raise RuntimeError("no plan today")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(switch_module, "plan_moves", no_plan)
        with pytest.raises(PlanningFailed, match="no plan today"):
            scheduler.controller.request(2)
    assert drafts_of(scheduler) == [[7, 7]] * 4
    output = scheduler.schedule()
    (one,) = output.steps.values()
    assert one.scheduled_spec_decode_tokens == {f"r{i}": [7, 7] for i in range(4)}


def test_a_failed_plan_gives_drafts_back() -> None:
    check_a_failed_plan_gives_drafts_back()
    undo = {"self.request.spec_token_ids = self.spec_token_ids": "pass"}
    with mutated(switch_module._Undo.apply, undo), pytest.raises(AssertionError):
        check_a_failed_plan_gives_drafts_back()


def test_steps_without_tokens_draft_nothing() -> None:
    """A worker is told of requests that were given up; that is no step of any draft length."""
    scheduler = with_requests(make())
    scheduler.controller.drafts.request(0)
    step(scheduler, [])
    scheduler.finish_requests([f"r{i}" for i in range(4)], RequestStatus.FINISHED_ABORTED)
    silent = scheduler.schedule()
    (told,) = silent.steps.values()
    assert told.finished_req_ids and not told.total_num_scheduled_tokens
    scheduler.update_from_output(
        silent, [StepResult(i, answer(one), 0.01) for i, one in silent.steps.items()]
    )
    (sample,) = scheduler.controller.report().drafts
    assert (sample.num_speculative_tokens, sample.steps) == (0, 1)

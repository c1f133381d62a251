"""The scheduler of schedulers with drafts, without workers."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from benchmarks.without_workers import answer, engine_config, request
from pat_vllm.executor.executor import StepResult
from pat_vllm.scheduler import switch as switch_module
from pat_vllm.scheduler.replica import Replica
from pat_vllm.scheduler.replica_set import ReplicaSet
from pat_vllm.scheduler.requests import counted_drafts
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.scheduler.speculation import DraftLengths
from pat_vllm.scheduler.switch import PlanningFailed
from tests.speculation.protocol import check_storm
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


@pytest.mark.parametrize("seed", range(4))
def test_storm(seed: int) -> None:
    check_storm(seed)


@pytest.mark.parametrize("seed", range(4))
def test_storm_with_preemptions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def preempting(scheduler: Scheduler, request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(scheduler, request, *args, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempting)
    check_storm(seed, requests=80, num_blocks=8, arrivals=0.9)
    assert len(preempted) > 3


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        pytest.param(
            switch_module._rewind,
            {"request.spec_token_ids = []": "pass"},
            id="drafts are kept at a switch",
        ),
        pytest.param(
            ReplicaSet.drain,
            {
                "self.finish(self.executor.finished(wait_for_all=True))": """\
results = self.executor.finished(wait_for_all=True)
    for one in results:
        for tokens in one.output.sampled_token_ids:
            del tokens[1:]
    self.finish(results)"""
            },
            id="accepted tokens are dropped at a switch",
        ),
        pytest.param(
            ReplicaSet.finish,
            {
                "self._collect(replica.finish(result.output, result.drafts))": """\
self._collect(replica.finish(result.output, None))
        if result.drafts is not None:
            other = self.replicas[result.replica - 1]
            other.scheduler.update_draft_token_ids(result.drafts)"""
            },
            id="drafts come to another replica",
        ),
        pytest.param(
            Replica.finish,
            {"self.scheduler.update_draft_token_ids(drafts)": "pass"},
            id="drafts come to nobody",
        ),
        pytest.param(
            DraftLengths._table, {"requested is not None": "requested"}, id="0 is not a length"
        ),
        pytest.param(
            DraftLengths.write,
            {"self._written == (requested, of_policy, replicas)": "self._written[0] == requested"},
            id="a new layout's schedulers have their own draft length",
        ),
        pytest.param(
            counted_drafts,
            {"- sum(map(bool, generated))": "- len(generated)"},
            id="what was not sampled counts as rejected",
        ),
    ],
)
def test_the_storm_sees(function: Any, changes: dict[str, str]) -> None:
    with mutated(function, changes), pytest.raises(AssertionError):
        check_storm(0)

"""The scheduler of schedulers, without workers: what a switch does to requests and pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from benchmarks.without_workers import EXECUTOR, answer, engine_config, request
from pat_vllm.executor.executor import StepResult
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import Policy
from pat_vllm.reporting import SwitchReport
from pat_vllm.scheduler import block_pools as pools
from pat_vllm.scheduler import scheduler as scheduler_module
from pat_vllm.scheduler import switch as switch_module
from pat_vllm.scheduler.scheduler import PATScheduler


@pytest.fixture
def scheduler() -> Any:
    """For eight ranks, in the layout tp8dp1."""
    config, stock = engine_config(8, num_blocks=80)
    return PATScheduler(vllm_config=config, **stock)


def add(scheduler: Any, number: int, first: int = 0) -> None:
    for index in range(first, first + number):
        scheduler.add_request(request(f"r{index}", index))


def step(scheduler: Any) -> dict[int, Any]:
    output = scheduler.schedule()
    results = [StepResult(i, answer(one), 0.01) for i, one in output.steps.items()]
    return scheduler.update_from_output(output, results)


def no_plan(*args: Any) -> None:
    raise RuntimeError("no plan today")


def refusals(scheduler: Any) -> int:
    return len(scheduler._history.report(scheduler._layout, scheduler._layouts).refused)


class Restless(Policy):
    """Asks for a layout that the engine is not in."""

    def __init__(self, home: Layout, wanted: Layout) -> None:
        self.home = home
        self.wanted = wanted
        self.seen: list[Any] = []

    def choose(self, state: Any) -> Layout:
        return self.wanted

    def switched(self, report: SwitchReport) -> None:
        raise RuntimeError("a policy's mistake")


def test_a_refused_plan_gives_its_block_pools_back(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(*args: Any, **options: Any) -> BlockPool:
        made.append(args)
        return BlockPool(*args, **options)

    monkeypatch.setattr(pools, "BlockPool", make)
    add(scheduler, 4)
    step(scheduler)
    monkeypatch.setattr(switch_module, "plan_moves", no_plan)
    for _ in range(3):
        assert scheduler._switch_command(2) is False
    assert refusals(scheduler) == 3
    monkeypatch.undo()
    monkeypatch.setattr(pools, "BlockPool", make)
    assert scheduler._switch_command(2) is True
    assert made == []
    for replica in scheduler._replicas:
        pool = replica.scheduler.kv_cache_manager.block_pool
        held = sum(
            len(replica.scheduler.kv_cache_manager.get_block_ids(one)[0])
            for one in replica.scheduler.requests
        )
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - held


def test_a_policy_that_is_refused_waits_before_it_is_asked_again(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(switch_module, "plan_moves", no_plan)
    home, _, wanted, *_ = scheduler._layouts
    scheduler._policy = Restless(home, wanted)
    add(scheduler, 4)
    for tried in (1, 2):
        for _ in range(3):
            step(scheduler)
            assert refusals(scheduler) == tried
        now[0] += scheduler_module._AFTER_REFUSAL


def test_the_engine_is_in_the_new_layout_when_its_policy_hears_of_it(scheduler: Any) -> None:
    """What a policy does wrong then leaves the requests where they are."""
    home, _, wanted, *_ = scheduler._layouts
    scheduler._policy = Restless(home, wanted)
    add(scheduler, 4)
    with pytest.raises(RuntimeError, match="a policy's mistake"):
        scheduler.schedule()
    assert scheduler._layout == wanted
    assert len(scheduler._replicas) == wanted.replicas
    assert {f"r{i}" for i in range(4)} == set(scheduler._live)
    assert all(
        scheduler._live.owner(one) is replica
        for replica in scheduler._replicas
        for one in replica.scheduler.requests
    )


def test_a_failed_hand_over_fails_the_engine(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = []
    monkeypatch.setattr(EXECUTOR, "fail", lambda: failed.append(True), raising=False)
    monkeypatch.setattr(switch_module, "_hand_over", no_plan)
    add(scheduler, 4)
    step(scheduler)
    with pytest.raises(RuntimeError, match="no plan today"):
        scheduler._switch_command(2)
    assert failed and not refusals(scheduler)


def test_a_request_that_fails_just_before_a_switch(scheduler: Any) -> None:
    """vLLM's loop may ask for two steps before it hands out what came of the first.

    Such as that a grammar could not be compiled, of which no worker is told.
    """
    add(scheduler, 2)
    step(scheduler)
    broken = request("broken", 9)
    broken.structured_output_request = SimpleNamespace(grammar=ValueError("no such grammar"))
    broken.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    for one in ("r0", "r1"):
        scheduler.finish_requests(one, RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    scheduler.add_request(broken)
    silent = scheduler.schedule()
    assert not silent.steps
    scheduler.add_request(request("r2", 2))
    assert scheduler._switch_command(2) is True
    outputs = scheduler.update_from_output(silent, [])
    assert [(one.request_id, one.finish_reason) for one in outputs[0].outputs] == [
        ("broken", FinishReason.ERROR)
    ]
    later = scheduler.schedule()
    assert [set(one.num_scheduled_tokens) for one in later.steps.values()] == [{"r2"}]
    assert not scheduler.has_request("broken")


def test_blocks_are_freed_as_without_a_connector() -> None:
    """Where steps overlap, vLLM would hold those of a preempted request back for loads."""
    config, stock = engine_config(8, num_blocks=80)
    config.scheduler_config.async_scheduling = True
    scheduler: Any = PATScheduler(vllm_config=config, **stock)
    for tp in (8, 2, 1):
        scheduler._switch_command(tp)
        for replica in scheduler._replicas:
            config = replica.scheduler.vllm_config
            assert config.max_concurrent_batches > 1 and config.kv_transfer_config.is_kv_consumer
            assert not replica.scheduler.defer_block_free


def test_prompts_are_not_kept(scheduler: Any) -> None:
    """They may be long, and the router remembers many."""
    add(scheduler, 4)
    assert all(isinstance(one, int | bytes) for one in scheduler._router._replica_of)

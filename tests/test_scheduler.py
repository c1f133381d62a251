"""The scheduler of schedulers, without workers: what a switch does to requests and pools."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from benchmarks.without_workers import EXECUTOR, answer, engine_config, request
from pat_vllm.executor.executor import StepResult
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import Policy
from pat_vllm.reporting import SwitchReport
from pat_vllm.scheduler import block_pools as pools
from pat_vllm.scheduler import layout_controller, monitor
from pat_vllm.scheduler import switch as switch_module
from pat_vllm.scheduler.layout_controller import LayoutController
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.scheduler.speculation import DraftLengths
from pat_vllm.scheduler.stats import merge_outputs
from pat_vllm.scheduler.switch import PlanningFailed
from tests.support.mutation import mutated


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
    return len(scheduler.controller.report().refused)


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
        with pytest.raises(PlanningFailed, match="no plan today"):
            scheduler.controller.request(2)
    assert refusals(scheduler) == 3
    monkeypatch.undo()
    monkeypatch.setattr(pools, "BlockPool", make)
    assert scheduler.controller.request(2) is True
    assert made == []
    for replica in scheduler.replica_set.replicas:
        pool = replica.scheduler.kv_cache_manager.block_pool
        held = sum(
            len(replica.scheduler.kv_cache_manager.get_block_ids(one)[0])
            for one in replica.scheduler.requests
        )
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - held


@pytest.mark.parametrize("known", [True, False], ids=["refused", "failed"])
def test_a_policy_whose_switch_is_not_made_waits_before_it_is_asked_again(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(layout_controller, "time", clock)
    monkeypatch.setattr(monitor, "time", clock)
    if known:
        monkeypatch.setattr(EXECUTOR, "is_sleeping", True)
    else:
        monkeypatch.setattr(switch_module, "plan_moves", no_plan)
    home, _, wanted, *_ = scheduler.controller.layouts
    scheduler.monitor.policy = Restless(home, wanted)
    add(scheduler, 4)
    for tried in (1, 2):
        for _ in range(3):
            step(scheduler)
            assert refusals(scheduler) == tried
        now[0] += layout_controller.REFUSED_BACK_OFF if known else layout_controller.FAILED_BACK_OFF


def test_a_known_reason_refuses_before_a_step_waits(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A streaming-input session must not stall the replicas at each try."""
    drained: list[bool] = []

    def finished(wait_for_all: bool = False) -> list[Any]:
        drained.append(wait_for_all)
        return []

    monkeypatch.setattr(EXECUTOR, "finished", finished)
    session = request("session", 3)
    session.resumable = True
    add(scheduler, 2)
    scheduler.add_request(session)
    step(scheduler)
    assert scheduler.controller.request(2) is False
    assert drained == []
    report = scheduler.controller.report()
    assert report.refused[-1].expected and report.errors == 0
    session.resumable = False
    assert scheduler.controller.request(2) is True
    assert drained == [True]


def test_a_report_ends_the_work_that_is_over(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was started before the last response ended does not hide its batch."""
    ended: list[float] = []
    stays = scheduler.replica_set.layout
    policy = Restless(stays, stays)
    monkeypatch.setattr(policy, "idle", ended.append)
    monkeypatch.setattr(scheduler.monitor, "policy", policy)
    add(scheduler, 2)
    output = scheduler.schedule()
    scheduler.finish_requests(["r0", "r1"], RequestStatus.FINISHED_ABORTED)
    results = [StepResult(i, answer(one), 0.01) for i, one in output.steps.items()]
    with monkeypatch.context() as late:
        late.setattr(EXECUTOR, "finished", lambda wait_for_all=False: results)
        assert scheduler.replica_set.in_flight and not ended
        scheduler.controller.report()
    assert not scheduler.replica_set.in_flight and len(ended) == 1
    scheduler.controller.report()
    assert len(ended) == 1


def test_a_mistake_in_planning_is_told_with_its_traceback(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By policy, too, where nobody waits for an answer; what was planned is undone."""
    home, _, wanted, *_ = scheduler.controller.layouts
    scheduler.monitor.policy = Restless(home, wanted)
    monkeypatch.setattr(switch_module, "plan_moves", no_plan)
    monkeypatch.setattr(layout_controller.logger, "propagate", True)
    add(scheduler, 4)
    output = scheduler.schedule()
    (record,) = [one for one in caplog.records if "could not be planned" in one.message]
    assert record.exc_info is not None and "no plan today" in str(record.exc_info[1])
    (refused,) = scheduler.controller.report().refused
    assert "no plan today" in refused.why and not refused.expected
    assert scheduler.controller.report().errors == 1
    assert sum(len(one.num_scheduled_tokens) for one in output.steps.values()) == 4


def test_a_switch_that_was_asked_for_in_vain_is_not_made_later(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_controller, "REQUEST_TIMEOUT", 0.05)
    add(scheduler, 2)
    step(scheduler)  # this thread is the engine's from here on
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            scheduler.controller.request(2)
        except BaseException as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(30)
    (error,) = failed
    assert isinstance(error, TimeoutError) and "withdrawn" in str(error)
    before = scheduler.replica_set.layout
    step(scheduler)
    assert scheduler.replica_set.layout == before


def test_prompts_of_embeddings_are_told_apart(scheduler: Any) -> None:
    """Or all of them would be siblings, and have one length."""
    for name, value in (("a", 1.0), ("b", 2.0), ("again a", 1.0)):
        one = request(name, 1)
        one.prompt_token_ids = None
        one.prompt_embeds = torch.full((32, 8), value, dtype=torch.bfloat16)
        scheduler.add_request(one)
    a, b, again = scheduler.monitor.requests.arrays().group
    assert a == again != b


def test_the_engine_is_in_the_new_layout_when_its_policy_hears_of_it(scheduler: Any) -> None:
    """What a policy does wrong then leaves the requests where they are."""
    home, _, wanted, *_ = scheduler.controller.layouts
    scheduler.monitor.policy = Restless(home, wanted)
    add(scheduler, 4)
    with pytest.raises(RuntimeError, match="a policy's mistake"):
        scheduler.schedule()
    assert scheduler.replica_set.layout == wanted
    assert len(scheduler.replica_set.replicas) == wanted.replicas
    assert {f"r{i}" for i in range(4)} == set(scheduler.monitor.requests)
    assert all(
        scheduler.monitor.requests.replica_of(one) is replica
        for replica in scheduler.replica_set.replicas
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
        scheduler.controller.request(2)
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
    assert scheduler.controller.request(2) is True
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
        scheduler.controller.request(tp)
        for replica in scheduler.replica_set.replicas:
            config = replica.scheduler.vllm_config
            assert config.max_concurrent_batches > 1 and config.kv_transfer_config.is_kv_consumer
            assert not replica.scheduler.defer_block_free


def check_live_requests_of_replicas(scheduler: Any) -> None:
    """From one step to the next, also across a switch; one replica has all there are."""
    add(scheduler, 5)
    step(scheduler)
    assert scheduler.controller.request(2) is True
    step(scheduler)
    add(scheduler, 1, first=5)
    step(scheduler)
    history = scheduler.controller.report().timeline
    assert [sample.num_seqs for sample in history] == [5, 5, 6]
    assert history[0].by_replica == ()
    for sample in history[1:]:
        assert sample.layout == Layout(2, 4)
        assert len(sample.by_replica) == 4 and sum(sample.by_replica) == sample.num_seqs
        assert max(sample.by_replica) - min(sample.by_replica) <= 1
    # Steps in which nothing comes or goes add nothing.
    step(scheduler)
    assert scheduler.controller.report().timeline == history


def test_live_requests_of_replicas_are_in_the_report(scheduler: Any) -> None:
    check_live_requests_of_replicas(scheduler)


@pytest.mark.parametrize(
    "changes",
    [
        {"for replica in active.replicas": "for replica in active.replicas[:1]"},
        {"by_replica if len(by_replica) > 1 else ()": "by_replica"},
        {"active.layout, num_seqs, several": "active.layout, num_seqs"},
    ],
)
def test_wrong_numbers_of_live_requests_are_seen(scheduler: Any, changes: dict[str, str]) -> None:
    with mutated(LayoutController._follow_policy, changes), pytest.raises(AssertionError):
        check_live_requests_of_replicas(scheduler)


def test_prompts_are_not_kept(scheduler: Any) -> None:
    """They may be long, and the router remembers many."""
    add(scheduler, 4)
    assert all(isinstance(one, int | bytes) for one in scheduler.replica_set._router._replica_of)


def check_draft_length_asked_for_when_work_is_over(scheduler: Any) -> None:
    """vLLM's in-process engine makes no step after a batch: its end is seen when the next comes."""
    config: Any = SimpleNamespace(
        num_speculative_tokens=4, num_speculative_tokens_per_batch_size=None
    )
    scheduler.controller.drafts = DraftLengths(config, dict)
    for length in (0, 2, None):
        add(scheduler, 2)
        step(scheduler)
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        scheduler.controller.drafts.request(length)
        add(scheduler, 2)
        step(scheduler)
        table = set(scheduler.replica_set.replicas[0].scheduler.dynamic_sd_lookup)
        assert table == {4 if length is None else length}
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)


def test_a_draft_length_asked_for_when_work_is_over_holds_for_the_next_batch(
    scheduler: Any,
) -> None:
    check_draft_length_asked_for_when_work_is_over(scheduler)


def test_a_draft_length_that_an_end_seen_later_undoes_is_noticed(scheduler: Any) -> None:
    with (
        mutated(LayoutController.go_home_if_idle, {"drafts.release()": "drafts.request(None)"}),
        pytest.raises(AssertionError),
    ):
        check_draft_length_asked_for_when_work_is_over(scheduler)


def test_outputs_that_went_out_together_have_the_time_of_the_last() -> None:
    """Or a token of a later step would have come before the step was scheduled."""
    from vllm.v1.engine import EngineCoreOutputs

    waiting: dict[int, EngineCoreOutputs] = {}
    for at in (2.0, 3.0, 1.0):
        merge_outputs(waiting, {0: EngineCoreOutputs(timestamp=at)})
    assert waiting[0].timestamp == 3.0

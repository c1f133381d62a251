"""The scheduler of schedulers, without workers: what a switch does to requests and pools."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from pat_vllm.executor.executor import StepResult
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import Policy
from pat_vllm.reporting import SwitchReport
from pat_vllm.scheduler import block_pools, layout_controller, monitor
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.scheduler.stats import mean_of_gpus, merge_outputs, merge_stats
from pat_vllm.scheduler.switching import switch_plan
from pat_vllm.scheduler.switching.switch import PlanningFailed
from tests.vllm.without_workers import (
    EXECUTOR,
    answer,
    engine_config,
    pat_scheduler,
    request,
    request_of,
)


@pytest.fixture
def scheduler() -> Any:
    """For eight ranks, in the layout tp8dp1."""
    return pat_scheduler(8, num_blocks=80)


def add(scheduler: Any, number: int, first: int = 0) -> None:
    for index in range(first, first + number):
        scheduler.add_request(request(f"r{index}", index))


def results_of(output: Any) -> list[StepResult]:
    return [StepResult(i, answer(step), 0.01) for i, step in output.steps.items()]


def step(scheduler: Any) -> dict[int, Any]:
    output = scheduler.schedule()
    outputs: dict[int, Any] = scheduler.update_from_output(output, results_of(output))
    return outputs


def no_plan(*args: Any) -> None:
    raise RuntimeError("no plan today")


def refusals(scheduler: Any) -> int:
    return len(scheduler.controller.report().refused)


class Restless(Policy):
    """Asks for a layout that the engine is not in, and fails when it gets it."""

    def __init__(self, default: Layout, wanted: Layout) -> None:
        self.default_layout = default
        self.wanted = wanted

    def choose(self, state: Any) -> Layout:
        return self.wanted

    def switched(self, report: SwitchReport) -> None:
        raise RuntimeError("a policy's mistake")


def make_restless(scheduler: Any) -> Layout:
    default, _, wanted, *_ = scheduler.controller.layouts
    scheduler.monitor.policy = Restless(default, wanted)
    return wanted


# -------------------------------------------------------------------- switches that are not made


def request_states(scheduler: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: (
            request.status,
            request.num_computed_tokens,
            request.num_preemptions,
            request.skip_reading_prefix_cache,
            replica.scheduler.kv_cache_manager.get_block_ids(name),
        )
        for replica in scheduler.replica_set.replicas
        for name, request in replica.scheduler.requests.items()
    }


def test_a_failed_plan_is_undone_and_gives_its_block_pools_back(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_pools = []

    def make(*args: Any, **options: Any) -> BlockPool:
        new_pools.append(args)
        return BlockPool(*args, **options)

    monkeypatch.setattr(block_pools, "BlockPool", make)
    scheduler.controller.costs.mode = "migrate"
    add(scheduler, 3)
    scheduler.add_request(request_of("no cache", [3] * 32, 8000, prompt_logprobs=1))
    step(scheduler)
    before = request_states(scheduler)
    with monkeypatch.context() as failing:
        failing.setattr(switch_plan, "plan_moves", no_plan)
        for _ in range(3):
            with pytest.raises(PlanningFailed, match="no plan today"):
                scheduler.controller.request_switch(2)
            assert request_states(scheduler) == before
    assert refusals(scheduler) == 3
    assert scheduler.controller.request_switch(2) is True
    assert new_pools == []
    for replica in scheduler.replica_set.replicas:
        manager = replica.scheduler.kv_cache_manager
        held = sum(len(manager.get_block_ids(name)[0]) for name in replica.scheduler.requests)
        free = manager.block_pool.get_num_free_blocks()
        assert free == manager.block_pool.num_gpu_blocks - 1 - held


@pytest.mark.parametrize("known", [True, False], ids=["refused", "failed"])
def test_a_policy_waits_after_a_switch_that_was_not_made(
    scheduler: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    known: bool,
) -> None:
    """A mistake of PAT's is logged with its traceback, for nobody waits for an answer."""
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(layout_controller, "time", clock)
    monkeypatch.setattr(monitor, "time", clock)
    monkeypatch.setattr(layout_controller.logger, "propagate", True)
    if known:
        monkeypatch.setattr(EXECUTOR, "is_sleeping", True)
    else:
        monkeypatch.setattr(switch_plan, "plan_moves", no_plan)
    make_restless(scheduler)
    add(scheduler, 4)
    for tried in (1, 2):
        for _ in range(3):
            step(scheduler)
            assert refusals(scheduler) == tried
        now[0] += layout_controller.REFUSED_BACK_OFF if known else layout_controller.FAILED_BACK_OFF
    report = scheduler.controller.report()
    assert {(refusal.expected, "no plan today" in refusal.why) for refusal in report.refused} == {
        (known, not known)
    }
    assert report.errors == (0 if known else 2)
    logged = [record for record in caplog.records if "could not be planned" in record.message]
    assert len(logged) == (0 if known else 2)
    assert all(record.exc_info and "no plan today" in str(record.exc_info[1]) for record in logged)


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
    assert scheduler.controller.request_switch(2) is False
    assert drained == []
    report = scheduler.controller.report()
    assert report.refused[-1].expected and report.errors == 0
    session.resumable = False
    assert scheduler.controller.request_switch(2) is True
    assert drained == [True]


def test_a_layout_that_is_not_kept_ready_is_an_error(scheduler: Any) -> None:
    for wanted, why in ((3, "tp=3: .* 8 ranks"), ("tp2dp2", "keeps tp1dp8, .*, tp8dp1 ready")):
        with pytest.raises(ValueError, match=f"cannot switch to .*{why}"):
            scheduler.controller.request_switch(wanted)


@pytest.mark.parametrize("queued", [False, True], ids=["when it waits", "before it waits"])
def test_parts_of_a_streaming_input_session_meet_in_one_replica(queued: bool) -> None:
    """vLLM gives a reason for the end of each part, under the session's one id."""
    scheduler = pat_scheduler(1, num_blocks=80)

    def part(seed: int) -> Any:
        request_ = request("session", seed, max_tokens=2)
        request_.resumable = True
        return request_

    def holders() -> list[Any]:
        replicas = scheduler.replica_set.replicas
        return [replica for replica in replicas if "session" in replica.scheduler.requests]

    scheduler.add_request(part(0))
    if queued:
        scheduler.add_request(part(1))
    (holder,) = holders()
    for _ in range(2):
        step(scheduler)
    if not queued:
        scheduler.add_request(part(1))
    assert holders() == [holder]
    session = holder.scheduler.requests["session"]
    # Of the first part's output the last token was not computed.
    assert list(session.prompt_token_ids) == [
        *part(0).prompt_token_ids,
        7,
        *part(1).prompt_token_ids,
    ]
    for _ in range(2):
        step(scheduler)
    assert holders() == [holder] and list(scheduler.monitor.requests) == ["session"]
    # The word that nothing more comes.
    scheduler.add_request(request("session", 2))
    assert not holders() and not list(scheduler.monitor.requests)
    assert scheduler.controller.request_switch(2) is True


def test_a_streaming_input_session_that_waits_can_be_aborted() -> None:
    scheduler = pat_scheduler(1, num_blocks=80)
    session = request("session", 0, max_tokens=1)
    session.resumable = True
    scheduler.add_request(session)
    step(scheduler)
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    scheduler.finish_requests(["session"], RequestStatus.FINISHED_ABORTED)
    assert session.is_finished() and not list(scheduler.monitor.requests)


def test_a_switch_whose_caller_has_given_up_is_not_made_later(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_controller, "REQUEST_TIMEOUT", 0.05)
    add(scheduler, 2)
    step(scheduler)  # this thread is the engine's from here on
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            scheduler.controller.request_switch(2)
        except BaseException as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(60)
    (error,) = failed
    assert isinstance(error, TimeoutError) and "withdrawn" in str(error)
    before = scheduler.replica_set.layout
    step(scheduler)
    assert scheduler.replica_set.layout == before


def test_a_switch_that_another_thread_asks_for_waits_for_the_first_step(scheduler: Any) -> None:
    """While requests are added, which the plan would miss."""
    add(scheduler, 2)
    done: list[bool] = []
    asking = threading.Thread(target=lambda: done.append(scheduler.controller.request_switch(2)))
    asking.start()
    asking.join(0.2)
    assert not done and scheduler.replica_set.layout.tp == 8
    add(scheduler, 2, first=2)
    step(scheduler)
    asking.join(60)
    assert done == [True] and scheduler.replica_set.layout.tp == 2
    assert len([*scheduler.monitor.requests]) == 4


def test_a_failed_hand_over_fails_the_engine(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[Exception] = []
    monkeypatch.setattr(EXECUTOR, "fail", failed.append, raising=False)
    monkeypatch.setattr(switch_plan.SwitchPlan, "hand_over", no_plan)
    add(scheduler, 4)
    step(scheduler)
    with pytest.raises(RuntimeError, match="no plan today"):
        scheduler.controller.request_switch(2)
    assert str(failed[0]) == "no plan today" and not refusals(scheduler)


def test_the_engine_is_in_the_new_layout_when_its_policy_hears_of_it(scheduler: Any) -> None:
    """What a policy does wrong then leaves the requests where they are."""
    wanted = make_restless(scheduler)
    add(scheduler, 4)
    with pytest.raises(RuntimeError, match="a policy's mistake"):
        scheduler.schedule()
    assert scheduler.replica_set.layout == wanted
    assert len(scheduler.replica_set.replicas) == wanted.replicas
    assert {f"r{i}" for i in range(4)} == set(scheduler.monitor.requests)
    assert all(
        scheduler.monitor.requests.replica_of(name) is replica
        for replica in scheduler.replica_set.replicas
        for name in replica.scheduler.requests
    )


# -------------------------------------------------------------------- requests and steps


def test_a_request_that_fails_just_before_a_switch(scheduler: Any) -> None:
    """vLLM's loop may ask for two steps before it hands out what came of the first.

    Such as that a grammar could not be compiled, of which no worker is told.
    """
    add(scheduler, 2)
    step(scheduler)
    broken = request("broken", 9)
    broken.structured_output_request = SimpleNamespace(grammar=ValueError("no such grammar"))
    broken.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    for name in ("r0", "r1"):
        scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    scheduler.add_request(broken)
    silent = scheduler.schedule()
    assert not silent.steps
    scheduler.add_request(request("r2", 2))
    assert scheduler.controller.request_switch(2) is True
    outputs = scheduler.update_from_output(silent, [])
    assert [(output.request_id, output.finish_reason) for output in outputs[0].outputs] == [
        ("broken", FinishReason.ERROR)
    ]
    later = scheduler.schedule()
    assert [set(output.num_scheduled_tokens) for output in later.steps.values()] == [{"r2"}]
    assert not scheduler.has_request("broken")


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize("again", ["preempted", "at the next switch"])
def test_what_a_carried_request_may_not_read_from_the_cache_it_computes_again(
    scheduler: Any, again: str, prompt_logprobs: int | None
) -> None:
    """As vLLM has it with prompt log-probabilities: what is read from the cache has none."""
    costs, prompt = scheduler.controller.costs, list(range(3, 67))
    carried = request_of("r1", prompt, 100, prompt_logprobs=prompt_logprobs)
    for each in (request_of("r0", prompt, 100), carried):  # which comes first, whatever is made
        scheduler.add_request(each)
    costs.mode = "migrate"
    step(scheduler)
    assert scheduler.controller.request_switch(2) is True
    step(scheduler)
    assert carried.num_computed_tokens == len(prompt) + 1
    if again == "preempted":
        holder = scheduler.monitor.requests.replica_of("r1").scheduler
        holder.running.remove(carried)
        holder._preempt_request(carried, 0.0)
    else:
        costs.mode = "recompute"
        assert scheduler.controller.request_switch(8) is True
    steps = [each.num_scheduled_tokens for each in scheduler.schedule().steps.values()]
    (computed,) = [tokens["r1"] for tokens in steps if "r1" in tokens]
    assert computed == carried.num_tokens - (0 if prompt_logprobs else len(prompt))


def test_a_report_ends_the_work_that_is_over(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was started before the last response ended does not hide its batch."""
    ended: list[float] = []
    stays = scheduler.replica_set.layout
    policy = Restless(stays, stays)
    monkeypatch.setattr(policy, "batch_over", lambda now, batch: ended.append(now))
    monkeypatch.setattr(scheduler.monitor, "policy", policy)
    add(scheduler, 2)
    output = scheduler.schedule()
    scheduler.finish_requests(["r0", "r1"], RequestStatus.FINISHED_ABORTED)
    with monkeypatch.context() as late:
        late.setattr(EXECUTOR, "finished", lambda wait_for_all=False: results_of(output))
        assert scheduler.replica_set.in_flight and not ended
        scheduler.controller.report()
    assert not scheduler.replica_set.in_flight and len(ended) == 1
    scheduler.controller.report()
    assert len(ended) == 1


@pytest.mark.parametrize("forced", [Layout(1, 8), Layout(8, 1)], ids=["other", "same"])
def test_a_users_layout_holds_until_the_work_is_over(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, forced: Layout
) -> None:
    """Then the engine goes back, and follows its policy again."""
    monkeypatch.setattr(Restless, "switched", lambda self, report: None)
    default = scheduler.replica_set.layout
    add(scheduler, 2)
    step(scheduler)
    assert scheduler.controller.request_switch(forced.tp) is True
    scheduler.monitor.policy = Restless(default, Layout(2, 4))
    step(scheduler)
    assert scheduler.replica_set.layout == forced
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    assert scheduler.replica_set.layout == default
    add(scheduler, 2, first=2)
    step(scheduler)
    assert scheduler.replica_set.layout == Layout(2, 4)


@pytest.mark.parametrize(
    ("happens", "over"),
    [("5 s", True), ("4 s", False), ("a reset", True), ("new weights", True)],
)
def test_when_a_batch_is_over(happens: str, over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that was asked for holds until then, also while tools run between two turns.

    The engine goes back before the next request is routed, and its prefixes come along.
    """
    scheduler = pat_scheduler(8, num_blocks=80, policy={"kind": "static", "tp": 8})
    scheduler.controller.costs.mode = "migrate"
    batch_over = Mock(wraps=scheduler.monitor.policy.batch_over)
    monkeypatch.setattr(type(scheduler.monitor.policy), "batch_over", batch_over)
    scheduler.add_request(request_of("r0", [3] * 64, 1))
    assert scheduler.controller.request_switch(2)
    step(scheduler)
    step(scheduler)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.controller.report().timeline[-1].num_seqs == 0
    if happens == "a reset":
        assert scheduler.reset_prefix_cache()
        assert scheduler.replica_set.layout == Layout(8, 1), "at once"
    elif happens == "new weights":
        monkeypatch.setattr(EXECUTOR, "weights_version", 5, raising=False)
    else:
        scheduler.monitor.last_end -= float(happens.removesuffix(" s"))
    scheduler.add_request(request_of("r1", [3] * 65, 1))
    assert scheduler.replica_set.layout == (Layout(8, 1) if over else Layout(2, 4))
    assert batch_over.call_count == over
    output = scheduler.schedule()
    scheduler.update_from_output(output, results_of(output))
    back = [switch for switch in scheduler.controller.report().switches if switch.reason == "idle"]
    assert len(back) == over
    if happens == "5 s":
        assert back[0].cached_tokens == 64
        (made,) = output.steps.values()
        assert made.num_scheduled_tokens == {"r1": 1}, "the rest is cached"


def test_what_a_batch_taught_is_kept_when_the_engine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is not over."""
    scheduler = pat_scheduler(8, num_blocks=80, policy={"kind": "static", "tp": 8})
    batch_over = Mock()
    monkeypatch.setattr(type(scheduler.monitor.policy), "batch_over", batch_over)
    add(scheduler, 1)
    step(scheduler)
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert not batch_over.called
    scheduler.shutdown()
    assert batch_over.call_count == 1


def test_a_paused_engine_keeps_its_layout(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its policy says."""
    monkeypatch.setattr(Restless, "switched", lambda self, report: None)
    default, wanted = scheduler.replica_set.layout, make_restless(scheduler)
    add(scheduler, 2)
    for state, layout in ((PauseState.PAUSED_ALL, default), (PauseState.UNPAUSED, wanted)):
        scheduler.set_pause_state(state)
        step(scheduler)
        assert scheduler.replica_set.layout == layout


# -------------------------------------------------------------------- reports


def test_live_requests_of_replicas_are_in_the_report(scheduler: Any) -> None:
    """From one step to the next, also across a switch; one replica has all there are."""
    add(scheduler, 5)
    step(scheduler)
    assert scheduler.controller.request_switch(2) is True
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
    step(scheduler)  # in which nothing comes or goes
    assert scheduler.controller.report().timeline == history


def test_prompts_are_known_by_hashes(scheduler: Any) -> None:
    """They may be long, and the router remembers many; those of embeddings differ, too."""
    add(scheduler, 4)
    for name, value in (("a", 1.0), ("b", 2.0), ("again a", 1.0)):
        embedded = request(name, 1)
        embedded.prompt_token_ids = None
        embedded.prompt_embeds = torch.full((32, 8), value, dtype=torch.bfloat16)
        scheduler.add_request(embedded)
    a, b, again = scheduler.monitor.requests.arrays().group[4:]
    assert a == again != b
    assert all(isinstance(key, int | bytes) for key in scheduler.replica_set._router._replica_of)


def test_blocks_are_freed_as_without_a_connector() -> None:
    """Where steps overlap, vLLM would hold those of a preempted request back for loads."""
    config, stock = engine_config(8, num_blocks=80)
    config.scheduler_config.async_scheduling = True
    scheduler: Any = PATScheduler(vllm_config=config, **stock)
    for tp in (8, 2):
        scheduler.controller.request_switch(tp)
        for replica in scheduler.replica_set.replicas:
            config = replica.scheduler.vllm_config
            assert config.max_concurrent_batches > 1 and config.kv_transfer_config.is_kv_consumer
            assert not replica.scheduler.defer_block_free


def test_a_half_computed_request_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Model Runner V2 and overlapping steps, vLLM says in which step it may go on. Each
    scheduler counts its own, and a new one has made none."""
    config, stock = engine_config(8, max_num_batched_tokens=512)
    config.scheduler_config.async_scheduling = True
    # A config of its own would ask for Triton, which schedulers do not need.
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)
    scheduler: Any = PATScheduler(vllm_config=config, **stock)
    scheduler.controller.costs.mode = "recompute"
    scheduler.add_request(live := request("r0", 0, prompt=8000))

    def tokens_of_a_step() -> int:
        output = scheduler.schedule()
        results = results_of(output)
        for result in results:
            result.output.sampled_token_ids = [[] if live.is_prefill_chunk else [7]]
        scheduler.update_from_output(output, results)
        return sum(step.total_num_scheduled_tokens for step in output.steps.values())

    assert [tokens_of_a_step() for _ in range(30)][-10:] == [1] * 10
    assert live.next_decode_eligible_step >= 30
    assert scheduler.controller.request_switch(2)
    assert all([tokens_of_a_step() > 1 for _ in range(8000 // (2 * 512))])


def test_outputs_that_went_out_together_have_the_time_of_the_last() -> None:
    """Or a token of a later step would have come before the step was scheduled."""
    waiting: dict[int, EngineCoreOutputs] = {}
    for at in (2.0, 3.0, 1.0):
        merge_outputs(waiting, {0: EngineCoreOutputs(timestamp=at)})
    assert waiting[0].timestamp == 3.0


def test_what_gpus_compute_is_the_mean_of_all_replicas_whenever_it_was_computed() -> None:
    first, second = (
        SimpleNamespace(
            perf_stats=SimpleNamespace(
                num_flops_per_gpu=n, num_read_bytes_per_gpu=4 * n, num_write_bytes_per_gpu=8 * n
            )
        )
        for n in (400, 80)
    )
    mean_of_gpus(first, 4)  # type: ignore[arg-type]
    mean_of_gpus(second, 8)  # type: ignore[arg-type]
    mean_of_gpus(SimpleNamespace(perf_stats=None), 8)  # type: ignore[arg-type]
    for stats in (first, second):
        stats.kv_cache_eviction_events = []
        stats.prefix_cache_stats = PrefixCacheStats()
        stats.cudagraph_stats = stats.spec_decoding_stats = None
    merge_stats(first, second)  # type: ignore[arg-type]
    assert vars(first.perf_stats) == {
        "num_flops_per_gpu": 110,
        "num_read_bytes_per_gpu": 440,
        "num_write_bytes_per_gpu": 880,
    }

"""The scheduler of schedulers with drafts, without workers: lengths, counts, what a switch does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from pat_vllm.executor.executor import StepResult
from pat_vllm.layout import Layout
from pat_vllm.predictor.draft_schedule import Schedule, draft_lengths, every_length
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.profile import StepShape
from pat_vllm.reporting import DraftCounts, EngineHistory
from pat_vllm.scheduler.draft_rows import DraftRows
from pat_vllm.scheduler.monitor import Monitor
from pat_vllm.scheduler.requests import counted_drafts, step_shape, verified_drafts
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.scheduler.speculation import DraftLengths, lengths_to_plan
from pat_vllm.scheduler.stats import add_spec_decoding_stats
from pat_vllm.scheduler.switching import switch_plan
from pat_vllm.scheduler.switching.switch import PlanningFailed
from tests.unit.reporting.samples import switch_report
from tests.vllm.scheduler.protocol import SPECULATIVE, check_storm
from tests.vllm.scheduler.test_scheduler import no_plan
from tests.vllm.without_workers import answer, engine_config, pat_scheduler, request

ONE, TWO = Layout(1, 2), Layout(2, 1)
KEPT = draft_lengths(4, None)

# -------------------------------------------------------------------- schedulers


def make(policy: dict[str, Any] | None = None, **speculative: Any) -> Any:
    """A scheduler of eight ranks, in the layout tp8dp1, with four requests."""
    scheduler = pat_scheduler(
        8, num_blocks=80, policy=policy, speculative_config=SPECULATIVE | speculative
    )
    add(scheduler)
    return scheduler


def add(scheduler: Any) -> None:
    for i in range(4):
        scheduler.add_request(request(f"r{i}", i))


def finish(scheduler: Any) -> None:
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)


def step(scheduler: Any, drafts: list[int]) -> set[int]:
    """A step in which each request gets these drafts; the draft lengths it asks for."""
    output = scheduler.schedule()
    results = [
        StepResult(i, answer(step), 0.01, proposed(step, drafts))
        for i, step in output.steps.items()
    ]
    scheduler.update_from_output(output, results)
    return {step.num_spec_tokens_to_schedule for step in output.steps.values()}


def proposed(step: Any, drafts: list[int]) -> DraftTokenIds | None:
    names = list(step.num_scheduled_tokens)
    return DraftTokenIds(names, [list(drafts) for _ in names]) if drafts and names else None


def drafts_of(scheduler: Any) -> list[list[int]]:
    return [
        request.spec_token_ids
        for replica in scheduler.replica_set.replicas
        for request in replica.scheduler.requests.values()
    ]


def test_draft_lengths_by_the_policys_layout() -> None:
    policy = {"kind": "schedule", "switch_at": {"1": 8}, "num_speculative_tokens": {1: 0, 2: 2}}
    scheduler = make(policy)
    for tp, length in ((1, 0), (2, 2), (8, 4), (1, 0)):
        assert scheduler.controller.request_switch(tp)
        for _ in range(2):
            assert step(scheduler, []) == {length}
    scheduler.controller.drafts.request(1)
    assert step(scheduler, []) == {1}
    assert scheduler.controller.request_switch(8)
    assert step(scheduler, []) == {1}


def test_a_draft_length_asked_for_when_work_is_over_holds_for_the_next_batch() -> None:
    """vLLM's in-process engine makes no step after a batch: its end is seen when the next comes."""
    scheduler = make()
    for length in (0, 2, None):
        step(scheduler, [])
        finish(scheduler)
        scheduler.controller.drafts.request(length)
        add(scheduler)
        assert step(scheduler, []) == {4 if length is None else length}


@pytest.mark.parametrize("known", [True, False], ids=["refused", "failed"])
def test_a_switch_drops_drafts_and_one_that_is_not_made_keeps_them(known: bool) -> None:
    """They are verified in the next step."""
    scheduler = make()
    step(scheduler, [7, 7])
    if known:
        (session, *_) = scheduler.replica_set.replicas[0].scheduler.running
        session.resumable = True
        assert scheduler.controller.request_switch(2) is False
        session.resumable = False
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(switch_plan, "plan_moves", no_plan)
            with pytest.raises(PlanningFailed):
                scheduler.controller.request_switch(2)
    assert drafts_of(scheduler) == [[7, 7]] * 4
    output = scheduler.schedule()
    (of_replica,) = output.steps.values()
    assert of_replica.scheduled_spec_decode_tokens == {f"r{i}": [7, 7] for i in range(4)}
    result = StepResult(0, answer(of_replica), 0.01, proposed(of_replica, [8]))
    scheduler.update_from_output(output, [result])
    assert drafts_of(scheduler) == [[8]] * 4
    assert scheduler.controller.request_switch(2)
    assert drafts_of(scheduler) == [[]] * 4


def test_a_request_keeps_its_counts_of_drafts_through_switches() -> None:
    scheduler = pat_scheduler(
        8,
        num_blocks=80,
        speculative_config=SPECULATIVE,
        per_request_spec_decode_metrics="summary",
    )
    add(scheduler)
    step(scheduler, [])
    (replica,) = scheduler.replica_set.replicas
    held = list(replica.scheduler.requests.values())
    counts = [request.spec_decode_metrics for request in held]
    assert scheduler.controller.request_switch(2)
    assert None not in counts
    assert all(request.spec_decode_metrics is c for request, c in zip(held, counts, strict=True))


def test_steps_without_tokens_draft_nothing() -> None:
    """A worker is told of requests that were given up; that is no step of any draft length."""
    scheduler = make()
    scheduler.controller.drafts.request(0)
    step(scheduler, [])
    finish(scheduler)
    silent = scheduler.schedule()
    (of_replica,) = silent.steps.values()
    assert of_replica.finished_req_ids and not of_replica.total_num_scheduled_tokens
    scheduler.update_from_output(silent, [StepResult(0, answer(of_replica), 0.01)])
    (sample,) = scheduler.controller.report().drafts
    assert (sample.num_speculative_tokens, sample.steps) == (0, 1)


@pytest.mark.parametrize("seed", range(2))
def test_storm(seed: int) -> None:
    check_storm(seed)


@pytest.mark.parametrize("seed", [0])
def test_storm_with_preemptions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def preempting(scheduler: Scheduler, request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request.request_id)
        preempt(scheduler, request, *args, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempting)
    check_storm(seed, requests=80, num_blocks=8, arrivals=0.9)
    assert len(preempted) > 3


# -------------------------------------------------------------------- which length holds


@settings(max_examples=30)
@given(st.integers(1, 128), st.integers(1, 300))
def test_a_runner_is_told_of_every_length(longest: int, batch: int) -> None:
    lengths = draft_lengths(longest, None)
    table = build_dynamic_sd_schedule_lookup(every_length(lengths), batch, longest)
    assert len(table) == batch + 1
    assert table[1:] == [lengths[min(i, len(lengths) - 1)] for i in range(batch)]


def config(schedule: Any = None) -> Any:
    return SimpleNamespace(
        method="ngram", num_speculative_tokens=4, num_speculative_tokens_per_batch_size=schedule
    )


def replicas(number: int) -> list[Any]:
    limits = SimpleNamespace(max_num_seqs=6)
    return [
        SimpleNamespace(scheduler=SimpleNamespace(scheduler_config=limits, dynamic_sd_lookup=None))
        for _ in range(number)
    ]


def written(lengths: DraftLengths, layout: Layout, active: list[Any]) -> list[int]:
    """The draft length by the number of requests from 0, alike in all replicas."""
    lengths.write(layout, active)
    table: list[int] = active[0].scheduler.dynamic_sd_lookup
    assert all(replica.scheduler.dynamic_sd_lookup == table for replica in active)
    return table


def test_draft_lengths_through_requests_switches_and_ends_of_work() -> None:
    of_policy: dict[Layout, Schedule] = {TWO: ((1, 1, 1),)}
    lengths = DraftLengths(config(), KEPT, lambda: of_policy)
    two, single = replicas(2), replicas(1)
    assert written(lengths, ONE, two) == [4] * 7
    assert written(lengths, TWO, single) == [0] + [1] * 6
    lengths.request(2)
    assert single[0].scheduler.dynamic_sd_lookup == [0] + [1] * 6
    assert written(lengths, TWO, single) == [2] * 7
    # The policy's change with its plans.
    lengths.request(None)
    lengths.write(TWO, single)
    of_policy = {TWO: ((1, 2, 4), (3, 3, 0))}
    assert written(lengths, TWO, single) == [0, 4, 4, 0, 0, 0, 0]
    lengths.request(2)
    two = replicas(2)
    assert written(lengths, ONE, two) == [2] * 7
    for length, expected in ((0, 0), (None, 4), (2, 2)):
        lengths.request(length)
        assert written(lengths, ONE, two) == [expected] * 7
    # The end of the work takes back what was used in it, and not what is for the next.
    lengths.release()
    assert written(lengths, ONE, two) == [4] * 7
    lengths.request(2)
    lengths.release()
    assert written(lengths, ONE, two) == [2] * 7


def test_a_users_schedule_holds_where_nothing_else_was_said() -> None:
    schedule = [(1, 2, 4), (3, 4, 3)]
    lengths = DraftLengths(
        config(schedule), draft_lengths(4, schedule), lambda: {TWO: ((1, 1, 0),)}
    )
    single = replicas(1)
    assert lengths.allowed == (0, 1, 2, 3, 4)
    assert written(lengths, ONE, replicas(2)) == [0, 4, 4, 3, 3, 3, 3]
    assert written(lengths, TWO, single) == [0] * 7
    lengths.request(3)
    assert written(lengths, TWO, single) == [3] * 7
    # A policy that plans may choose among the lengths only where there is no such schedule.
    assert lengths_to_plan(config(schedule), KEPT) == (0,) == lengths_to_plan(None, ())
    assert lengths_to_plan(config(), KEPT) == (0, 1, 2, 4)


def test_lengths_that_are_refused() -> None:
    for length in (-1, 3, "2", 2.0, True, [1]):
        with pytest.raises(ValueError, match=r"the engine keeps \[0, 1, 2, 4\] ready"):
            DraftLengths(config(), KEPT, dict).request(length)  # type: ignore[arg-type]
    lengths = DraftLengths(None, (), dict)
    with pytest.raises(ValueError, match=r"cannot use 2 draft tokens.*does not speculate"):
        lengths.request(2)
    lengths.request(None)
    assert written(lengths, ONE, replicas(1)) is None


# -------------------------------------------------------------------- shapes and counts


def a_step(requests: dict[str, tuple[int, int, int]], k: int = 0, **new: int) -> SchedulerOutput:
    """Cached requests: name -> (context, tokens scheduled, drafts among them); new: tokens."""
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = replace(
        CachedRequestData.make_empty(),
        req_ids=list(requests),
        num_computed_tokens=[context for context, _, _ in requests.values()],
    )
    step.scheduled_new_reqs = [SimpleNamespace(req_id=name) for name in new]  # type: ignore[misc]
    step.num_scheduled_tokens = {name: count for name, (_, count, _) in requests.items()} | new
    step.total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
    step.scheduled_spec_decode_tokens = {
        name: [7] * drafts for name, (_, _, drafts) in requests.items() if drafts
    }
    step.num_spec_tokens_to_schedule = k
    return step


def an_output(generated: dict[str, int]) -> Any:
    return ModelRunnerOutput(
        req_ids=list(generated),
        req_id_to_index={name: index for index, name in enumerate(generated)},
        sampled_token_ids=[[7] * count for count in generated.values()],
    )


DECODE, DRAFTED, CHUNK = (20, 1, 0), (10, 5, 4), (30, 8, 0)


@pytest.mark.parametrize(
    ("requests", "new", "shape"),
    [
        ({"a": DRAFTED, "b": (20, 3, 2)}, {}, StepShape(2, 32, 21, 0, 2, 6, 4)),
        ({"a": DRAFTED, "c": CHUNK}, {}, StepShape(1, 11, 11, 8, 2, 4, 4)),
        (
            {"a": DRAFTED, "b": DECODE, "c": CHUNK},
            {"new": 50},
            StepShape(2, 32, 21, 58, 2, 4, 4),
        ),
        ({}, {"new": 50}, StepShape(0, 0, 0, 50, 2, 0, 4)),
    ],
    ids=["drafts", "beside a chunk", "beside a chunk and a prompt", "a prompt"],
)
def test_shapes_of_steps(requests: Any, new: dict[str, int], shape: StepShape) -> None:
    """Decodes with drafts are not prefill, and the drafter runs after each step."""
    assert step_shape(a_step(requests, 4, **new), 2) == shape


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=6))
def test_counted_drafts(requests: list[tuple[int, int, bool]]) -> None:
    """Requests with drafts, of which some are accepted, or of which none is sampled."""
    named = {f"r{i}": (10, 1 + drafts, drafts) for i, (drafts, _, _) in enumerate(requests)}
    output = an_output(
        {
            f"r{i}": 1 + min(drafts, right) if samples else 0
            for i, (drafts, right, samples) in enumerate(requests)
        }
    )
    accepted = [min(drafts, right) for drafts, right, samples in requests if samples and drafts]
    drafted = sum(drafts for drafts, _, _ in requests)
    chosen = {f"r{i}" for i in range(1, len(requests), 2)}
    of_chosen = [min(request[:2]) for request in requests[1::2] if request[2] and request[0]]
    counts = counted_drafts(a_step(named), output, chosen)
    of_requests = (sum(request[0] for request in requests[1::2]), sum(of_chosen))
    assert counts == DraftCounts(drafted, sum(accepted), *of_requests)
    verified = [drafts for drafts, _, samples in requests if samples and drafts]
    assert verified_drafts(a_step(named), output).tolist() == [accepted, verified]
    assert verified_drafts(a_step(named), output, chosen)[0].tolist() == of_chosen


def test_drafts_of_a_request_that_is_gone_are_not_accepted() -> None:
    step = a_step({"a": (20, 3, 2), "b": (30, 2, 1), "c": (40, 1, 0)})
    assert verified_drafts(step, an_output({"a": 3, "c": 1})).tolist() == [[2], [2]]


@pytest.mark.parametrize(
    "between",
    [None, lambda monitor: monitor.switched(switch_report(1.0), []), Monitor.idle],
    ids=["nothing", "a switch", "the end"],
)
def test_a_policy_hears_of_the_length_that_the_drafts_were_made_with(between: Any) -> None:
    """Also after prompts alone. At a switch, and at the end of a batch, drafts are dropped."""
    heard: list[tuple[int, int, list[int]]] = []

    class Learner(StayPolicy):
        learns = True

        def verified(self, now: float, *verified: Any) -> None:
            length, requests, accepted, *_ = verified
            heard.append((length, requests, accepted.tolist()))

    table: Any = SimpleNamespace(move=lambda replicas: None)
    policy, history = Learner(Layout(1, 1)), EngineHistory()
    monitor = Monitor(policy, history, table, True, DraftRows(0, 1, 1))
    replica: Any = SimpleNamespace(index=0, decode_steps=0, cadence=lambda *args: args[1])
    steps = [
        (a_step({}, 1, a=20, b=30), {"a": 1, "b": 1}),
        (a_step({"a": (20, 1, 0), "b": (30, 1, 0)}, k=4), {"a": 1, "b": 1}),
        (a_step({"a": (21, 5, 4), "b": (31, 2, 1)}, k=2), {"a": 3, "b": 1}),
    ]
    for output, generated in steps:
        result: Any = SimpleNamespace(seconds=0.1, output=an_output(generated))
        monitor.stepped(Layout(1, 1), replica, output, 1, result)
        if between is not None:
            between(monitor)
    first, second = (0, 0) if between is not None else (1, 4)
    assert heard == [(first, 2, []), (second, 2, [2, 0])]


counts = st.lists(st.integers(0, 4), max_size=8)


@settings(max_examples=30)
@given(counts, counts)
def test_statistics_of_replicas_add_up(first: list[int], second: list[int]) -> None:
    def stats(accepted: list[int]) -> SpecDecodingStats:
        merged = SpecDecodingStats.new(4)
        for count in accepted:
            merged.observe_draft(num_draft_tokens=4, num_accepted_tokens=count)
        return merged

    merged = stats(first)
    add_spec_decoding_stats(merged, stats(second))
    assert merged == stats(first + second)


def test_an_engine_keeps_what_it_drafts_from(tmp_path: Path) -> None:
    def started() -> Any:
        drafts: Any = {"speculative_config": SPECULATIVE}
        config, stock = engine_config(8, num_blocks=80, state_dir=tmp_path, **drafts)
        return PATScheduler(vllm_config=config, **stock)

    first = started()
    add(first)
    (request, *_) = first.replica_set.replicas[0].scheduler.requests.values()
    request.append_output_token_ids([1, 2, 3])
    first.monitor.ended(request.request_id, FinishReason.STOP)
    first.shutdown()
    rows = started().monitor.draft_rows
    assert rows.num_bytes == first.monitor.draft_rows.num_bytes > 0

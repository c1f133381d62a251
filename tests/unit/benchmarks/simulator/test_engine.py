"""The simulator against runs computed by hand, and what always holds of it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.engine import SimulatedEngine, SimulatedLiveRequests
from benchmarks.simulator.replica import FreeMemory
from benchmarks.simulator.simulate import simulate, simulate_batches
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.profile import StepShape
from pat_vllm.reporting import Report
from tests.support.schedules import LayoutSchedule
from tests.unit.benchmarks.simulator.simple import (
    FREE,
    LAYOUTS,
    ONE,
    TWO,
    Constant,
    Linear,
    Recorder,
    batch,
    capacity_of,
    follow,
)

# -------------------------------------------------------------------- computed by hand


def test_replicas_run_freely() -> None:
    run = simulate(batch(3, 5), StayPolicy(ONE), Constant(), FREE)
    assert run.finished == (3.0, 5.0)
    assert run.seconds == run.generation_seconds == 5.0
    assert run.tokens == 8
    assert [(s.at, s.num_seqs) for s in run.timeline] == [(0.0, 2), (3.0, 1), (5.0, 0)]


def test_switch_and_return_home() -> None:
    """Both step for 3 s; then 2 s of switch, and the other's 7 tokens at 0.75 s; then back."""
    policy = Recorder(LayoutSchedule(ONE, ((1, TWO),)))
    runs = simulate_batches([batch(3, 10, max_tokens=10)] * 2, policy, Constant(), FREE)
    run = runs[0]
    assert run.finished == (3.0, 3 + 2 + 7 * 0.75)
    assert run.seconds == 10.25 + 2
    assert [s.reason for s in run.switches] == ["policy", "idle"]
    assert run.switches[0].seconds == 2.0 and run.switches[0].quiesce == 0.0
    assert run.switches[0].num_seqs == run.switches[0].migrated == 1
    assert run.switches[0].tokens == 4 + 3
    assert policy.events[:8] == [
        ("arrived", 0.0),
        ("arrived", 0.0),
        ("finished", 3.0, 3, True),
        ("switched", 3.0, "tp2dp1", 1),
        ("finished", 10.25, 10, False),  # it ran into max_tokens
        ("idle", 10.25),
        ("batch over", 10.25),
        ("switched", 10.25, "tp1dp2", 0),
    ]
    # The next batch begins after the gap, and its prompts are others.
    assert (runs[1].seconds, runs[1].began) == (12.25, 72.25)
    assert policy.groups == {0, 1, 2, 3}
    # They are reports of the engine's kind.
    report = Report.from_json(runs[1].to_json())
    assert (report.switches, report.timeline) == (runs[1].switches, runs[1].timeline)
    assert (report.layout, report.layouts) == (ONE, (ONE, TWO))
    assert runs[1].tokens == 13


def test_switch_waits_for_steps_in_flight() -> None:
    """The second replica starts half a second late: at 3.0 it is half through a step."""
    run = simulate(batch(3, 10, arrivals=[0.0, 0.5]), follow(ONE, (1, TWO)), Constant(), FREE)
    first = run.switches[0]
    assert (first.at, first.quiesce, first.seconds) == (3.0, 0.5, 2.5)
    # Three steps until 3.5, the switch until 5.5, seven more.
    assert run.finished == (3.0, 5.5 + 7 * 0.75)


def test_policy_is_asked_again_after_the_first_step_in_a_layout() -> None:
    """The second response ends in the step that the first switch waits for, until 3.5."""
    trace = batch(3, 3, 200, arrivals=[0.0, 0.5, 0.6])
    run = simulate(trace, follow(ONE, (1, TWO), (2, ONE)), Constant(), FREE)
    assert run.finished[:2] == (3.0, 3.5)
    assert [switch.at for switch in run.switches] == [3.0, 5.5 + 0.75]


def test_requests_beyond_max_num_seqs_wait() -> None:
    capacity = FREE.model_copy(update={"max_num_seqs": {1: 1, 2: 2}})
    run = simulate(batch(2, 3, 4), StayPolicy(TWO), Constant(), capacity)
    assert run.finished == (1.5, 2.25, 4.5)  # the third starts when the first has ended
    run = simulate(batch(2, 2, 2, 2), StayPolicy(ONE), Constant(), capacity)
    assert run.finished == (2.0, 2.0, 4.0, 4.0)
    # What both replicas run goes on in the one replica of the other layout, where nothing waits.
    run = simulate(batch(2, 2, 4, 4), follow(ONE, (2, TWO)), Constant(), capacity)
    assert run.finished == (2.0, 2.0, 4 + 3.0, 4 + 3.0)
    # Where there is room for one, it is the one that has KV, though another waits in replica 0.
    run = simulate(batch(2, 10, 5), follow(ONE, (1, TWO)), Constant(), capacity_of(1))
    assert run.finished == (2.0, 4 + 8 * 0.75, 4 + 13 * 0.75)


def test_arrivals_and_idle_time() -> None:
    policy = Recorder(LayoutSchedule(TWO))
    run = simulate(batch(2, 2, 2, arrivals=[1.0, 1.1, 10.0]), policy, Constant(), FREE)
    # The second is admitted at 1.75, when the first step of the first is over.
    assert run.finished == (2.5, 3.25, 11.5)
    assert [event[0] for event in policy.events].count("batch over") == 2
    assert run.seconds == 11.5


def test_prompts_are_computed_in_chunks_and_shared_by_samples() -> None:
    capacity = FREE.model_copy(update={"max_batch_tokens": {2: 10}})
    run = simulate(batch(2, prompt=25), StayPolicy(TWO), Constant(), capacity)
    # 10 + 10 + 5 tokens of prompt, the last with the first token; then the second token.
    assert run.finished == (4 * 0.75,)
    assert run.prefilled == 25
    prefilled = [
        simulate(batch(2, 2, prompt=25, groups=groups), StayPolicy(TWO), Constant(), FREE).prefilled
        for groups in ([7, 7], [7, 8])
    ]
    assert prefilled == [26, 50]


def test_requests_without_room_for_their_kv_are_preempted() -> None:
    capacity = capacity_of(kv_tokens={2: 30})
    run = simulate(batch(20, 20), StayPolicy(TWO), Constant(), capacity)
    assert run.preempted > 0 and run.tokens == 40
    assert run.prefilled > 8 and run.seconds > 20 * 0.75
    for trace in (batch(40), batch(4, prompt=40)):
        with pytest.raises(ValueError, match="cannot hold the KV of a request of"):
            simulate(trace, StayPolicy(TWO), Constant(), capacity)


@dataclass(frozen=True)
class Observed(Constant):
    """Notes what steps compute."""

    shapes: list[tuple[int, int, int, int]] = field(default_factory=list)

    def step_seconds(self, layout: Layout, shape: StepShape, now: float) -> float:
        self.shapes.append((shape.batch, shape.context, shape.longest, shape.prefill))
        return super().step_seconds(layout, shape, now)


def test_shapes_of_steps() -> None:
    observed = Observed()
    simulate(batch(3, 9, prompt=4), StayPolicy(TWO), observed, FREE)
    # Both prompts, two steps of both requests, and six of the longer one.
    alone = [(1, tokens, tokens, 0) for tokens in range(7, 13)]
    assert observed.shapes == [(0, 0, 0, 8), (2, 10, 5, 0), (2, 12, 6, 0), *alone]


def test_a_policy_sees_live_requests() -> None:
    engine = SimulatedEngine(batch(30, 200), Constant(), FREE, StayPolicy(ONE))
    while engine.num_seqs == 2:
        engine.advance()
    requests = engine.state().requests()
    assert isinstance(requests, SimulatedLiveRequests)
    assert engine.now == 30.0
    assert requests.num_output_tokens.tolist() == [30]
    assert requests.num_computed_tokens.tolist() == [34]
    assert requests.remaining.tolist() == [170]


# -------------------------------------------------------------------- properties

small_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@st.composite
def schedules(draw: st.DrawFn, total: int) -> LayoutSchedule:
    at = sorted(draw(st.sets(st.integers(1, max(1, total - 1)), max_size=4)))
    switches = tuple((ended, draw(st.sampled_from(LAYOUTS))) for ended in at)
    return LayoutSchedule(draw(st.sampled_from(LAYOUTS)), switches)


@settings(max_examples=50)
@given(st.data(), small_lengths)
def test_every_request_finishes_with_its_length(data: st.DataObject, lengths: list[int]) -> None:
    arrivals = data.draw(st.lists(st.floats(0, 30), min_size=len(lengths), max_size=len(lengths)))
    capacity = FREE.model_copy(
        update={
            "max_num_seqs": {tp: data.draw(st.integers(1, 4)) for tp in (1, 2, 4)},
            "max_batch_tokens": {tp: data.draw(st.integers(4, 64)) for tp in (1, 2, 4)},
            "kv_tokens": {tp: data.draw(st.integers(50, 300)) for tp in (1, 2, 4)},
        }
    )
    trace = batch(*lengths, prompt=data.draw(st.integers(1, 9)), arrivals=arrivals)
    policy = Recorder(data.draw(schedules(len(lengths))))
    run = simulate(trace, policy, Linear(), capacity)
    ended = [event for event in policy.events if event[0] == "finished"]
    assert sorted(event[2] for event in ended) == sorted(lengths)
    assert run.tokens == sum(lengths)
    assert all(at > came for at, came in zip(run.finished, trace.arrivals, strict=True))
    assert run.generation_seconds == max(run.finished) <= run.back
    # A switch is reported after the steps that it lets finish, with the time when it began.
    times = [event[1] for event in policy.events if event[0] != "switched"]
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(times))
    assert run.timeline[-1].num_seqs == 0


def test_what_was_freed_first_is_overwritten_first_and_its_end_first() -> None:
    """What preempted requests find again."""
    memory = FreeMemory(10)
    memory.free(5, owner=1)
    memory.free(7, owner=2)
    memory.overwrite(12)
    assert memory.total == 10
    assert memory.take_back(1) == 3 and memory.take_back(1) == 0
    memory.overwrite(7)
    assert memory.take_back(2) == 0 and memory.total == 0

"""Trajectories of several turns, by hand and by what always holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.predictor.state import Turn
from pat_vllm.simulator import shapes
from pat_vllm.simulator.simulate import simulate
from pat_vllm.simulator.traces import LengthTrace, TurnLengths
from tests.support.schedules import FollowSchedule, LayoutSchedule
from tests.unit.simulator.simple import (
    FREE,
    LAYOUTS,
    ONE,
    TWO,
    Constant,
    Linear,
    Recorder,
    capacity_of,
    follow,
)

EP = Layout(2, 1, "ep")


def turns(*trajectories: list[tuple[int, int, float]], prompt: int = 33) -> LengthTrace:
    """Of (response, appended tokens, seconds of the tool)."""
    lengths = [[TurnLengths(*turn) for turn in trajectory] for trajectory in trajectories]
    return LengthTrace.of_trajectories("test", lengths, 100_000, 0, [prompt] * len(lengths))


def test_a_turn_arrives_after_the_one_before_it_and_computes_what_it_appends() -> None:
    trace = turns([(4, 10, 2.5), (3, 0, 0.0)], [(8, 0, 0.0)])
    policy = Recorder(LayoutSchedule(TWO))
    run = simulate(trace, policy, Constant(), FREE)
    # Four steps until 3.0; the tool until 5.5, in the middle of the other's eighth and last step.
    assert run.finished == (3.0, 6.0 + 3 * 0.75, 6.0)
    # 36 of 37 tokens are in the cache: two whole blocks.
    assert run.prefilled == 2 * 33 + (37 + 10 - 32)
    events = [event for event in policy.events if event[0] in ("arrived", "ended")]
    assert events == [
        ("arrived", 0.0, Turn(0, 0, 0), 33),
        ("arrived", 0.0, Turn(2, 0, 0), 33),
        ("ended", 3.0, Turn(0, 0, 0), 37),
        ("arrived", 5.5, Turn(0, 1, 37), 47),
        ("ended", 6.0, Turn(2, 0, 0), 41),
        ("ended", 8.25, Turn(0, 1, 37), 50),
    ]


def test_contexts_are_evicted_where_requests_need_the_room_the_oldest_first() -> None:
    """Two contexts of 37 tokens, in memory for 115, beside a third trajectory's."""
    first, second = [(4, 10, 20.0), (2, 0, 0.0)], [(4, 10, 21.0), (2, 0, 0.0)]
    # By the third's turn the first context has 35 tokens left, or 20; by its own, which
    # takes what is left, the second has 23, or 8. Whole blocks count.
    for length, again in ((5, 0 + 16), (20, 16 + 32)):
        trace = turns(first, second, [(4, 0, 1.0), (length, 0, 0.0)])
        full = simulate(trace, StayPolicy(TWO), Constant(), FREE)
        assert full.prefilled == 3 * 33 + 15 + 15 + (37 - 32)
        run = simulate(trace, StayPolicy(TWO), Constant(), capacity_of(kv_tokens={2: 115}))
        assert (run.prefilled - full.prefilled, run.preempted) == (again, 0)


@pytest.mark.parametrize(("until", "idle"), [(100.0, 1), (20.0, 2), (0.0, 2)])
def test_an_engine_without_requests_stays_while_some_are_expected(until: float, idle: int) -> None:
    """The end of the trace is an end in any case."""

    class Patient(Recorder):
        def is_over(self, now: float) -> bool:
            return now >= until

    policy = Patient(LayoutSchedule(ONE, ((1, TWO),)))
    trace = turns([(4, 10, 30.0), (8, 0, 0.0)], [(8, 0, 0.0)])
    run = simulate(trace, policy, Constant(), FREE)
    back = [event for event in policy.events if event[0] == "idle"]
    assert len(back) == idle
    # Where it is over, the engine goes back when the next turn comes, if nobody has asked before.
    assert back[0][1] == {100.0: run.finished[1], 20.0: 34.0, 0.0: run.finished[2]}[until]
    # Either way the turn finds its context, for switches carry it.
    assert run.prefilled == 2 * 33 + 15


def test_a_switch_carries_contexts_at_the_cost_of_their_bytes() -> None:
    trace = turns([(4, 10, 9.0), (8, 0, 0.0)], [(9, 0, 0.0)])
    policy = follow(ONE, (1, TWO))
    capacity = capacity_of(kv_bytes_per_token=10)
    run = simulate(trace, policy, Linear(switch=1.0), capacity)
    (switch, _) = run.switches
    assert (switch.tokens, switch.cached_tokens, switch.kv_bytes) == (33 + 4, 37, 740)
    assert switch.kv == pytest.approx(1e-3 * 74)
    assert run.prefilled == 2 * 33 + 15
    # Live requests come first, and a context is carried as far as there is room.
    small = capacity_of(kv_tokens={2: 37 + 20}, kv_bytes_per_token=10)
    run = simulate(turns([(4, 10, 9.0), (1, 0, 0.0)], [(9, 0, 0.0)]), policy, Linear(), small)
    assert (run.switches[0].tokens, run.switches[0].cached_tokens) == (37, 20)
    assert run.preempted == 0


def test_the_contexts_that_ended_last_are_carried_first() -> None:
    """At 17.0 there is room for the second one and six tokens of the first, soon overwritten."""
    first, second = [(4, 10, 90.0), (2, 0, 0.0)], [(17, 10, 30.0), (2, 0, 0.0)]
    trace = turns(first, second, [(20, 0, 0.0)])
    capacity = capacity_of(kv_tokens={2: 2 * 50 + 6})
    run = simulate(trace, follow(ONE, (2, TWO)), Constant(), capacity)
    assert (run.switches[0].tokens, run.switches[0].cached_tokens) == (50, 50 + 6)
    assert run.prefilled == 3 * 33 + (60 - 48) + 47


def test_a_turn_is_admitted_by_the_next_step() -> None:
    """It goes to the other replica, which has begun a chunk before its arrival was known."""
    others = [[(100, 0, 0.0)], [(3, 0, 0.0)], *[[(60, 0, 0.0)]] * 6]
    trace = turns([(4, 10, 2.3), (2, 0, 0.0)], *others)
    arrivals, groups = (0.0, 2.3, 0.0, 0.0, *[2.5] * 6), (0, 1, 2, 2, *[3] * 6)
    trace = replace(trace, arrivals=arrivals, groups=groups)
    run = simulate(trace, StayPolicy(ONE), Constant(), FREE)
    assert run.finished[:2] == (4.0, 7.0 + 2)


def test_layouts_that_share_kv_move_nothing_and_keep_contexts() -> None:
    trace = turns([(4, 10, 9.0), (8, 0, 0.0)], [(9, 0, 0.0)])
    run = simulate(trace, follow(TWO, (1, EP)), Linear(), capacity_of(kv_bytes_per_token=10))
    assert (run.switches[0].cached_tokens, run.switches[0].kv_bytes) == (0, 0)
    assert run.prefilled == 2 * 33 + 15


def test_a_turn_goes_to_its_context_unless_four_more_requests_are_there() -> None:
    for others, alike in ((4, True), (6, False)):
        first = [(4, 10, 2.0), (2, 0, 0.0)]
        trace = turns(first, *[[(30 - 25 * (i % 2 == 0), 0, 0.0)] for i in range(2 * others)])
        run = simulate(trace, StayPolicy(ONE), Constant(), FREE)
        asked = 33 * (1 + 2 * others)
        assert (run.prefilled == asked + 15) == alike, (others, run.prefilled - asked)


def test_a_turn_that_comes_back_finds_what_an_earlier_one_has_left() -> None:
    """The second turn goes to the other replica, for five requests are where the first one was; the
    third comes back, for six are where the second one was."""
    trajectory = [(4, 10, 2.0), (20, 10, 2.0), (2, 0, 0.0)]
    five, single, six = [[(15, 0, 0.0)]] * 5, [[(100, 0, 0.0)]], [[(100, 0, 0.0)]] * 6
    trace = turns(trajectory, *five, *single, *six)
    trace = replace(
        trace,
        arrivals=trace.arrivals[:3] + (4.5,) * 5 + (26.3,) + (26.5,) * 6,
        groups=(0, 1, 2, *[3] * 5, 4, *[5] * 6),
    )
    run = simulate(trace, StayPolicy(ONE), Constant(), FREE)
    others = (33 + 4) + 33 + (33 + 5)
    # Of the first turn's 36 computed tokens two blocks are there.
    assert run.prefilled == others + 33 + 47 + (77 - 32)


@settings(max_examples=40)
@given(st.data())
def test_every_turn_finishes_and_chunks_change_nothing(data: st.DataObject) -> None:
    turn = st.tuples(st.integers(1, 60), st.integers(0, 30), st.floats(0, 40))
    trajectories = data.draw(
        st.lists(st.lists(turn, min_size=1, max_size=4), min_size=1, max_size=6)
    )
    trace = turns(*trajectories, prompt=data.draw(st.integers(1, 60)))
    room = {tp: data.draw(st.integers(500, 3000)) for tp in (1, 2, 4)}
    capacity = capacity_of(8, data.draw(st.integers(8, 64)), kv_tokens=room)
    ended = sorted(data.draw(st.sets(st.integers(1, len(trace)), max_size=3)))
    schedule = LayoutSchedule(
        data.draw(st.sampled_from(LAYOUTS)),
        tuple((at, data.draw(st.sampled_from(LAYOUTS))) for at in ended),
    )
    truth = Linear(token=0.0)
    runs = [
        simulate(trace, FollowSchedule(schedule), truth, capacity, chunk=chunk) for chunk in (32, 1)
    ]
    for run in runs:
        assert run.tokens == sum(trace.lengths)
        for request, before in enumerate(trace.after):
            assert (
                run.finished[request] >= run.finished[before] + trace.arrivals[request]
                or before < 0
            )
    assert runs[0].finished == pytest.approx(runs[1].finished, abs=1e-4)
    assert runs[0].prefilled == runs[1].prefilled


def test_agents_have_a_tail_of_turns() -> None:
    trace = shapes.agents(400, 32768, seed=1)
    last = sorted(trace.followed[request] for request in trace.trajectories.values())
    assert last[-1] == trace.max_tokens == 32768 and 6_000 < last[200] < 11_000
    counts = sorted([trace.first.count(first) for first in trace.trajectories])
    assert counts[0] == 1 and 6 <= counts[200] <= 9 and counts[380] >= 20
    tools = [at for at, before in zip(trace.arrivals, trace.after, strict=True) if before >= 0]
    assert 1 <= min(tools) < 1.1 and 9 < max(tools) <= 10
    assert len(trace.trajectories) == 400 and trace == shapes.agents(400, 32768, seed=1)
    assert trace.longest <= 32768 + 512


@pytest.mark.parametrize(
    ("trace", "seconds", "ended", "prefilled", "preempted", "switches"),
    [
        (
            shapes.staggered(60, 100, 1.0, 900, 3.0, seed=2),
            2550.817051542367,
            64298.3760490567,
            18982,
            16,
            [(510.7563856007413, 3972), (1521.6490963309707, 3344), (2549.817051542367, 0)],
        ),
        (
            shapes.grpo(12, 4, 0.6, 1.0, median=80, max_tokens=900, seed=1),
            1489.863318676259,
            29675.12082031646,
            5427,
            8,
            [(398.86699999999996, 3834), (1174.6490426160208, 3184), (1488.863318676259, 0)],
        ),
    ],
)
def test_runs_are_what_they_were(
    trace: LengthTrace,
    seconds: float,
    ended: float,
    prefilled: int,
    preempted: int,
    switches: list[tuple[float, int]],
) -> None:
    """To the last digit: arrivals, memory that is short, switches, of traces of one turn."""
    capacity = capacity_of(8, 64, kv_tokens={1: 1500, 2: 2400, 4: 4000})
    policy = follow(LAYOUTS[0], (20, LAYOUTS[2]), (40, LAYOUTS[1]))
    run = simulate(trace, policy, Linear(), capacity)
    assert (run.seconds, sum(run.finished)) == (seconds, ended)
    assert (run.prefilled, run.preempted) == (prefilled, preempted)
    assert [(switch.at, switch.tokens) for switch in run.switches] == switches
    assert all(switch.cached_tokens == 0 for switch in run.switches)

"""Trajectories of several turns: what waits, what comes back, and what that means for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.predictor import trajectories
from pat_vllm.predictor.state import Floats, Ints, LiveRequests, Turn
from pat_vllm.predictor.trajectories import Futures, Trajectories, forecast_of_turns
from tests.unit.predictor.examples import live_requests

FUTURES = 8


def batch(known: Trajectories, turns: Sequence[int], gap: float = 2.0, begin: float = 0.0) -> float:
    """Trajectories of so many turns, of which each takes a second and appends 30 tokens."""
    end = begin
    for trajectory, count in enumerate(turns):
        now, held = begin, 100
        for index in range(count):
            known.arrived(now, Turn(trajectory, index, held if index else 0), held + 30)
            now, held = now + 1, held + 50
            known.ended(now, Turn(trajectory, index, 0), held)
            now += gap
        end = max(end, now - gap)
    return end


def returning(known: Trajectories, now: float) -> float:
    return float(known._returning(now).sum())


def sample(known: Trajectories, now: float, live: LiveRequests, remaining: Ints) -> Futures:
    def lengths(count: int) -> Ints:
        return np.full((count, FUTURES), 40)

    return known.sample(now, live, remaining, lengths, 0.1)


NOBODY = live_requests([])
NOTHING = np.zeros((0, FUTURES), np.int64)


def test_batches_of_one_turn_are_over_at_once() -> None:
    known = Trajectories()
    now = batch(known, [1] * 8)
    assert not known.go_on and known.is_over(now)


def test_what_waits_is_expected_as_long_as_tools_took() -> None:
    known = Trajectories()
    now = batch(known, [4] * 8)
    assert not known.is_over(now)
    known.end_of_batch()  # as when weights change
    assert known.is_over(now)
    known.arrived(100.0, Turn(1, 0, 0), 100)
    assert known.is_over(101.0), "nothing waits"
    known.ended(101.0, Turn(1, 0, 0), 150)
    assert not known.is_over(101.0) and not known.is_over(102.9)
    assert known.is_over(101 + 1.5 * 2.0 + 0.1), "no tool took so long"


def test_the_last_turn_is_known_where_all_have_as_many() -> None:
    known = Trajectories()
    for begin in (0.0, 100.0):
        batch(known, [4] * 16, begin=begin)
        known.end_of_batch()
    known.ended(200.0, Turn(1, 3, 0), 300)
    assert known.is_over(200.0)
    known.ended(200.0, Turn(2, 2, 0), 250)
    assert not known.is_over(200.0) and returning(known, 200.0) == pytest.approx(1, abs=0.01)


def test_turns_in_lockstep_are_found_though_all_wait_at_once() -> None:
    """After the first turn of all the batch seems to be over. That is a mistake once."""
    known = Trajectories()
    for batch_ in range(2):
        for index in range(3):
            now = 100.0 * batch_ + 3 * index
            turns = [Turn(100 * batch_ + trajectory, index, 0) for trajectory in range(16)]
            for turn in turns:
                known.arrived(now, turn, 150)
            for turn in turns:
                known.ended(now + 1, turn, 200)
            assert known.is_over(now + 1) == ((batch_, index) in ((0, 0), (1, 2)))
            if known.is_over(now + 10):
                known.end_of_batch()


def test_a_batch_that_never_ends_forgets_what_does_not_return() -> None:
    """A server's: conversations end without a word, while others go on."""
    known = Trajectories()
    batch(known, [3] * 8)
    for trajectory in range(1000):
        now = 100.0 + trajectory
        known.arrived(now, Turn(100 + trajectory, 0, 0), 100)
        known.ended(now, Turn(100 + trajectory, 0, 0), 150)
    assert len(known._waiting) <= 4 and returning(known, 1100.0) < 1


def test_a_tool_that_takes_longer_than_any_before_is_learnt_from() -> None:
    known = Trajectories()
    batch(known, [3] * 8)
    known.ended(100.0, Turn(50, 0, 0), 150)
    known.ended(120.0, Turn(51, 0, 0), 150)
    assert returning(known, 120.0) < 1, "the first is not waited for"
    known.arrived(130.0, Turn(50, 1, 150), 180)
    known.ended(131.0, Turn(50, 1, 150), 200)
    assert not known.is_over(131.0 + 30), "tools may take 30 s"


def test_a_tool_that_has_run_long_has_less_left() -> None:
    known = Trajectories()
    batch(known, [8] * 8, gap=4.0)
    known.end_of_batch()
    known.ended(50.0, Turn(1, 0, 0), 100)
    soon, later = (sample(known, now, NOBODY, NOTHING) for now in (50.0, 53.0))
    first = [float(sampled.begin[1].max()) for sampled in (soon, later)]
    assert first == pytest.approx([40, 10]), "a token takes 0.1 s"


def test_turns_follow_each_other_with_what_tools_append() -> None:
    known = Trajectories()
    for begin in (0.0, 200.0):
        batch(known, [3] * 16, begin=begin)
        known.end_of_batch()
    known.arrived(400.0, Turn(1, 0, 0), 100)
    futures = sample(known, 400.0, live_requests([100]), np.full((1, FUTURES), 10))
    assert len(futures.begin) == 3
    assert futures.begin[:, 0].tolist() == pytest.approx([0, 30, 90])
    assert futures.end[:, 0].tolist() == pytest.approx([10, 70, 130])
    assert futures.held[:, 0].tolist() == pytest.approx([100, 140, 210])
    assert futures.over[0, 0] == pytest.approx(130)


def test_what_earlier_turns_held_is_not_to_be_computed() -> None:
    """A next turn that has not been scheduled yet has computed nothing, but caches have it."""
    live = replace(
        live_requests([1000, 1000, 1000]),
        num_computed_tokens=np.array([0, 0, 1000]),
        held=np.array([0, 900, 900]),
    )
    assert live.uncomputed == 1000 + 100


spans = st.lists(st.tuples(st.floats(0, 1000), st.floats(1, 1000)), min_size=1, max_size=30)


@settings(max_examples=60)
@given(spans)
def test_all_that_is_decoded_lies_ahead(turns: list[tuple[float, float]]) -> None:
    """Turns of trajectories of one turn each: those that begin later waited before."""
    begin, count = np.array([0.0, *(start for start, _ in turns)]), len(turns) + 1
    end = begin + np.array([10.0, *(length for _, length in turns)])

    def columns(values: Floats) -> Floats:
        return np.repeat(values[:, None], 2, axis=1)

    futures = Futures(columns(begin), columns(end), columns(np.full(count, 50.0)), columns(end))
    ahead = forecast_of_turns(futures)
    assert (ahead.steps >= 0).all() and (ahead.live >= 1).all() and (ahead.most >= 1).all()
    assert (
        ahead.live.max() <= count + 1e-9 and ahead.cached is not None and (ahead.cached >= 0).all()
    )
    assert ahead.steps.sum() <= end.max() * 1.001
    assert (ahead.longest <= 50 + end.max()).all()


@given(st.floats(1, 40), st.floats(0, 1e7), st.integers(1, 3))
def test_what_is_live_lies_ahead_however_far_the_next_turns_are(
    left: float, gap: float, others: int
) -> None:
    """A user comes back on the next day, and the responses of today are about to end."""
    begin = np.array([0.0, *[left + gap] * others])[:, None]
    end = begin + left
    futures = Futures(begin, end, 0 * begin + 50, np.full((1, 1), float(end.max())))
    ahead = forecast_of_turns(futures)
    assert len(ahead.live) and ahead.steps[-1] > 0 and ahead.longest[-1] <= 50 + end.max()
    assert ahead.steps.sum() >= 0.5 * left


def test_of_many_that_wait_the_likeliest_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Trajectories()
    now = batch(known, [2] * 8 + [1] * 64)
    monkeypatch.setattr(trajectories, "_MOST_WAITING", 16)
    futures = sample(known, now, NOBODY, NOTHING)
    assert futures.over.shape == (16, FUTURES)
    assert (futures.end > futures.begin).any()


def test_alone_a_trajectory_counts_by_the_time_in_which_it_decodes() -> None:
    """Ten turns of 100 tokens with tools between them that take as long."""
    begin = np.arange(10)[:, None] * 200.0 + np.zeros((10, 2))
    futures = Futures(begin, begin + 100, 0 * begin + 50, np.full((1, 2), 1900.0))
    ahead = forecast_of_turns(futures)
    assert ahead.steps.sum() == pytest.approx(1000, rel=0.1)
    assert ahead.live == pytest.approx(1)


def test_of_many_the_share_counts_that_decodes() -> None:
    """Half of them wait at any time: a step twice as fast saves a quarter of the time."""
    random = np.random.default_rng(0)
    shift = random.uniform(0, 200, 64)
    begin = np.concatenate([np.arange(-1, 10) * 200.0 + offset for offset in shift])[:, None]
    begin = np.repeat(begin, 2, axis=1)
    end = np.clip(begin + 100, 0, 2000)
    begin = np.clip(begin, 0, 2000)
    ahead = forecast_of_turns(Futures(begin, end, 0 * begin + 50, np.full((64, 2), 2000.0)))
    assert ahead.steps.sum() == pytest.approx(1000, rel=0.05)
    assert ahead.live == pytest.approx(32, rel=0.3)
    assert ahead.cached is not None
    assert ahead.cached == pytest.approx(ahead.context, rel=0.6)

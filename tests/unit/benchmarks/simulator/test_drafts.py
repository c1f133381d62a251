"""Simulated drafts: what is accepted, and engines that verify them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator import shapes
from benchmarks.simulator.drafts import AcceptedDrafts
from benchmarks.simulator.ground_truth import ReplayedGroundTruth
from benchmarks.simulator.simulate import simulate, simulate_batches
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.policy import Policy, SchedulePolicy
from pat_vllm.predictor.state import LiveState
from pat_vllm.profile import Profile
from tests.support.clairvoyant import ClairvoyantPolicy
from tests.support.modelled_profile import modelled_profile
from tests.unit.benchmarks.simulator.simple import (
    FREE,
    ONE,
    TWO,
    Constant,
    Verifying,
    batch,
    capacity_of,
)

LENGTHS = (0, 1, 2, 4)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 8), st.data())
def test_accepted_are_those_before_the_first_wrong_guess(
    lengths: list[int], k: int, data: st.DataObject
) -> None:
    """And no more than the response has room for, beside the token that the step makes itself."""
    guesses = AcceptedDrafts(batch(*lengths, acceptance=0.6))
    guessed = iter(guesses._guessed.tolist())
    responses = [[next(guessed) for _ in range(length)] for length in lengths]
    outputs = [data.draw(st.integers(0, length - 1)) for length in lengths]
    expected = [
        len(list(itertools.takewhile(bool, response[made:-1][:k])))
        for response, made in zip(responses, outputs, strict=True)
    ]
    index = np.arange(len(lengths))
    assert guesses.accepted(index, np.array(outputs), k).tolist() == expected


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_drafts_make_a_response_take_fewer_steps(k: int, acceptance: float) -> None:
    trace = batch(101, max_tokens=101, acceptance=acceptance)
    run = simulate(trace, SchedulePolicy(TWO, (), {TWO: ((1, 512, k),)}), Constant(), FREE)
    assert run.tokens == 101
    # The prefill gives a token; every other step verifies.
    assert run.seconds == 0.75 * (1 + -(-100 // (1 + k * acceptance)))
    expected = AcceptedDrafts(trace).draft_yield(np.zeros(1, np.int64), np.zeros(1, np.int64), [k])
    assert expected.tokens == pytest.approx([1 + k * acceptance])


class Changing(Policy):
    """Switches and changes its draft lengths all the time."""

    default_layout = ONE

    def __init__(self) -> None:
        self._asked = 0
        self._seen: dict[int, int] = {}

    def choose(self, state: LiveState) -> Layout:
        self._asked += 1
        live = state.requests()
        for request, tokens in zip(live.number.tolist(), live.num_output_tokens, strict=True):
            assert tokens >= self._seen.get(request, 0)
            self._seen[request] = tokens
        k = LENGTHS[self._asked % 4]
        self.drafts = {ONE: ((1, 2, k), (3, 512, 1)), TWO: ((1, 512, k),)}
        return (ONE, TWO)[self._asked // 3 % 2]


@pytest.mark.parametrize("capacity", [FREE, capacity_of(3, 64, {1: 700, 2: 1500})])
def test_every_response_has_its_length_however_k_changes(capacity: Profile) -> None:
    lengths = [1, 5, 40, 100, 300, 299, 41, 7]
    run = simulate(batch(*lengths, acceptance=0.6), Changing(), Verifying(), capacity)
    assert run.tokens == sum(lengths)
    assert len(run.switches) >= 2
    assert not np.isnan(run.finished).any()


PROFILE = modelled_profile("llama-3.1-8b", "A40", 4, draft_lengths=LENGTHS[1:], drafting=1e-3)


def long_tail(seed: int, acceptance: float) -> LengthTrace:
    return replace(shapes.lognormal(64, 200, 1.0, 2048, seed), acceptance=acceptance)


@pytest.mark.parametrize("acceptance", [0.02, 0.7])
def test_pat_learns_what_drafts_are_worth(acceptance: float) -> None:
    """Against no drafts; close to the clairvoyant, which chooses among the same lengths."""
    truth = ReplayedGroundTruth(PROFILE)
    batches = [long_tail(seed, acceptance) for seed in range(2)]
    seconds = {}
    for lengths in ((0,), LENGTHS):
        policy = AdaptivePolicy(PROFILE, bound=2048, draft_lengths=lengths, timer=lambda: 0.0)
        *_, run = simulate_batches(batches, policy, truth, PROFILE)
        seconds[lengths] = run.seconds
    clairvoyant = ClairvoyantPolicy(batches, PROFILE.layouts, truth, PROFILE, LENGTHS)
    *_, best = simulate_batches(batches, clairvoyant, truth, PROFILE)
    assert seconds[LENGTHS] < (0.75 if acceptance > 0.5 else 1.03) * seconds[0,]
    assert seconds[LENGTHS] < 1.06 * best.seconds

"""Simulated drafts: steps by draft length against brute force, and engines that verify them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.modelled.hardware import modelled_profile
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.policy import Policy, SchedulePolicy
from pat_vllm.predictor.state import LiveState
from pat_vllm.profile import Profile
from pat_vllm.simulator import shapes
from pat_vllm.simulator.accepted_drafts import AcceptedDraftTokens
from pat_vllm.simulator.ground_truth import ReplayedGroundTruth
from pat_vllm.simulator.simulate import simulate, simulate_batches
from pat_vllm.simulator.traces import LengthTrace
from tests.support.clairvoyant import ClairvoyantPolicy
from tests.unit.simulator.simple import FREE, ONE, TWO, Constant, Verifying, batch, capacity_of

LENGTHS = (0, 1, 2, 4)


def token_counts(guessed: list[bool], k: int) -> list[int]:
    """Tokens of a response before each of its steps, and its length: by brute force."""
    at, counts = 0, [0]
    while at < len(guessed):
        accepted = 0
        while accepted < k and at + accepted < len(guessed) and guessed[at + accepted]:
            accepted += 1
        at = min(at + accepted + 1, len(guessed))
        counts.append(at)
    return counts


RESPONSES = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=5)


@settings(max_examples=60)
@given(RESPONSES, st.integers(0, 8))
def test_steps_are_those_of_verification(responses: list[list[bool]], k: int) -> None:
    guesses = AcceptedDraftTokens([len(each) for each in responses], np.concatenate(responses))
    every = np.arange(len(responses))
    expected = [token_counts(each, k) for each in responses]
    assert guesses.steps_in_all(every, k).tolist() == [len(each) - 1 for each in expected]
    for request, tokens in enumerate(expected):
        index, steps = np.full(len(tokens), request), np.arange(len(tokens))
        assert guesses.outputs(index, steps, k).tolist() == tokens
        before = np.array(tokens[:-1])
        assert guesses.steps_made(index[:-1], before, k).tolist() == steps[:-1].tolist()
        # Of the last step, its response may end before its drafts do.
        accepted = guesses.accepted(index[:-1], before, k)
        assert accepted[:-1].tolist() == (np.diff(tokens) - 1)[:-1].tolist()


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_response_takes_the_steps_of_its_guesses(k: int, acceptance: float) -> None:
    trace = batch(101, max_tokens=101, acceptance=acceptance)
    run = simulate(trace, SchedulePolicy(TWO, (), {TWO: ((1, 512, k),)}), Constant(), FREE)
    guesses, index = AcceptedDraftTokens.of(trace), np.zeros(1, np.int64)
    # The prefill gives a token; every other step verifies.
    before = guesses.steps_made(index, np.ones(1, np.int64), k)
    assert run.tokens == 101
    assert run.seconds == 0.75 * (1 + int((guesses.steps_in_all(index, k) - before)[0]))


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


@pytest.mark.parametrize("layout", [ONE, TWO])
def test_chunks_with_drafts_are_exact_enough(layout: Layout) -> None:
    trace = batch(5, 40, 100, 300, 250, 120, acceptance=0.6)
    policy = SchedulePolicy(layout, (), {layout: ((1, 2, 4), (3, 512, 1))})
    for truth, rel in ((Verifying(), 2e-3), (Constant(), 1e-9)):
        steps, chunks = (simulate(trace, policy, truth, FREE, chunk=chunk) for chunk in (1, 32))
        assert steps.seconds == pytest.approx(chunks.seconds, rel=rel)


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

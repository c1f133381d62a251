"""Simulated drafts: steps by draft length, against brute force, and engines that make them."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.layouts_and_drafts import Setting, _believed, run_setting
from benchmarks.paper.clairvoyant import ClairvoyantPolicy
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.policy import Policy, SchedulePolicy
from pat_vllm.profiling.profile import StepShape
from pat_vllm.simulator import traces
from pat_vllm.simulator.guesses import GuessedTokens
from pat_vllm.simulator.modelled.hardware import named_profile
from pat_vllm.simulator.replay import simulate, simulate_batches
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import ReplayedTruth
from pat_vllm.simulator.tuned import tuned_schedule

ONE, TWO = Layout(1, 2), Layout(2, 1)
LENGTHS = (0, 1, 2, 4)


def chain(guessed, k):
    """Tokens before each step of one response, and its length."""
    at, found = 0, [0]
    while at < len(guessed):
        made = 0
        while made < k and at + made < len(guessed) and guessed[at + made]:
            made += 1
        at = min(at + made + 1, len(guessed))
        found.append(at)
    return found


RESPONSES = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=5)


@given(RESPONSES, st.integers(0, 8))
def test_steps_are_those_of_verification(responses, k):
    guesses = GuessedTokens([len(one) for one in responses], np.concatenate(responses))
    every = np.arange(len(responses))
    chains = [chain(one, k) for one in responses]
    assert guesses.steps_in_all(every, k).tolist() == [len(one) - 1 for one in chains]
    for request, tokens in enumerate(chains):
        index = np.full(len(tokens), request)
        steps = np.arange(len(tokens))
        assert guesses.outputs(index, steps, k).tolist() == tokens
        made = np.array(tokens[:-1])
        assert guesses.steps_made(index[:-1], made, k).tolist() == steps[:-1].tolist()
        gained = np.diff(tokens) - 1
        # Of the last step, its response may end before its drafts do.
        assert guesses.accepted(index[:-1], made, k)[:-1].tolist() == gained[:-1].tolist()


@given(RESPONSES, st.integers(0, 8), st.data())
def test_every_step_makes_a_token_wherever_it_begins(responses, k, data):
    guesses = GuessedTokens([len(one) for one in responses], np.concatenate(responses))
    request = data.draw(st.integers(0, len(responses) - 1))
    at = data.draw(st.integers(0, len(responses[request]) - 1))
    index, outputs = np.array([request]), np.array([at])
    made = guesses.steps_made(index, outputs, k)
    after = guesses.outputs(index, made + 1, k)
    assert at < after <= at + k + 1
    assert guesses.steps_in_all(index, k) > made


def test_acceptance_is_that_of_the_trace():
    trace = replace(traces.uniform(300, 200, 400, seed=1), acceptance=0.5)
    guesses, every = GuessedTokens.of(trace), np.arange(300)
    expected = guesses.drafting(every, np.zeros(300, np.int64), LENGTHS)
    assert expected.tokens[0] == 1
    assert expected.tokens[1] == pytest.approx(1.5, abs=0.02)
    assert guesses is GuessedTokens.of(replace(trace, name="again"))
    none = GuessedTokens.of(replace(trace, acceptance=0.0))
    assert none.drafting(every, np.zeros(300, np.int64), LENGTHS).tokens.tolist() == [1] * 4


@dataclass(frozen=True)
class Verifying:
    """A step takes 1 s and a little for drafts and context."""

    def step_seconds(self, layout, shape, now, steps=1):
        return (1.0 + 0.01 * shape.drafts + 1e-4 * shape.context) / layout.tp**0.5

    def switch_seconds(self, source, target, live, tokens):
        return 0.5


def batch(lengths, acceptance):
    count = len(lengths)
    nothing = (0.0,) * count
    return LengthTrace(
        "test",
        tuple(lengths),
        nothing,
        tuple(range(count)),
        (10,) * count,
        max(lengths),
        acceptance,
    )


def fixed(layout, k):
    return SchedulePolicy(layout, (), {layout: ((1, 512, k),)})


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_a_response_takes_the_steps_of_its_guesses(k, acceptance):
    trace = batch([101], acceptance)
    run = simulate(trace, fixed(TWO, k), Verifying(), ReplicaCapacity())
    guesses, index = GuessedTokens.of(trace), np.zeros(1, np.int64)
    # The prefill gives a token; every other step verifies.
    made = guesses.steps_made(index, np.ones(1, np.int64), k)
    steps = 1 + int((guesses.steps_in_all(index, k) - made)[0])
    assert run.tokens == 101
    assert run.steps[TWO].steps == steps


@pytest.mark.parametrize("layout", [ONE, TWO])
def test_draft_lengths_that_are_not_used_change_nothing(layout):
    lengths = [5, 40, 100, 300]
    runs = [
        simulate(batch(lengths, acceptance), policy, Verifying(), ReplicaCapacity())
        for acceptance in (0.0, 0.7)
        for policy in (fixed(layout, 0), SchedulePolicy(layout, ()))
    ]
    assert len({run.finished for run in runs}) == 1


class Changing(Policy):
    """Switches and changes its draft lengths all the time."""

    home = ONE

    def __init__(self):
        self._asked = 0

    def choose(self, state):
        self._asked += 1
        k = LENGTHS[self._asked % 4]
        self.drafts = {ONE: ((1, 2, k), (3, 512, 1)), TWO: ((1, 512, k),)}
        return (ONE, TWO)[self._asked // 3 % 2]


@pytest.mark.parametrize("capacity", [ReplicaCapacity(), ReplicaCapacity(3, 64, {1: 700, 2: 1500})])
def test_every_response_has_its_length_however_k_changes(capacity):
    lengths = [1, 5, 40, 100, 300, 299, 41, 7]
    run = simulate(batch(lengths, 0.6), Changing(), Verifying(), capacity)
    assert run.tokens == sum(lengths)
    assert len(run.switches) >= 2
    assert not np.isnan(run.finished).any()


@pytest.mark.parametrize("layout", [ONE, TWO])
def test_chunks_with_drafts_are_exact_enough(layout):
    trace = batch([5, 40, 100, 300, 250, 120], 0.6)
    policy = SchedulePolicy(layout, (), {layout: ((1, 2, 4), (3, 512, 1))})
    one, many = (
        simulate(trace, policy, Verifying(), ReplicaCapacity(), chunk=chunk) for chunk in (1, 32)
    )
    assert one.seconds == pytest.approx(many.seconds, rel=2e-3)
    assert one.steps[layout].steps == many.steps[layout].steps


PROFILE = named_profile("llama-3.1-8b", "A40", 4, draft_lengths=LENGTHS[1:], drafting=1e-3)


def test_steps_with_drafts_are_replayed():
    truth = ReplayedTruth(PROFILE)
    for sample in PROFILE.steps:
        if sample.k and sample.batch:
            found = truth.step_seconds(sample.layout, sample.shape, 0.0)
            assert found == pytest.approx(sample.seconds, rel=1e-6)
    half, none, every = (
        truth.step_seconds(PROFILE.layouts[0], StepShape(8, 8000, 1000, drafts=drafts, k=4), 0.0)
        for drafts in (16, 0, 32)
    )
    assert half == pytest.approx((none + every) / 2)
    with pytest.raises(ValueError, match="draft length 3"):
        truth.step_seconds(PROFILE.layouts[0], StepShape(8, 8000, 1000, drafts=24, k=3), 0.0)


def long_tail(seed, acceptance):
    return replace(traces.lognormal(64, 200, 1.0, 4096, seed), acceptance=acceptance)


def test_pat_learns_what_drafts_are_worth():
    """Against no drafts; close to the clairvoyant, which chooses among the same lengths."""
    truth, capacity = ReplayedTruth(PROFILE), ReplicaCapacity.of(PROFILE)
    seconds: dict[tuple[float, object], float] = {}
    for acceptance in (0.02, 0.7):
        batches = [long_tail(seed, acceptance) for seed in range(3)]
        for lengths in ((0,), LENGTHS):
            policy = AdaptivePolicy(PROFILE, bound=4096, draft_lengths=lengths, timer=lambda: 0.0)
            runs = simulate_batches(batches, policy, truth, capacity)
            seconds[acceptance, lengths] = sum(run.seconds for run in runs[1:])
        told = ClairvoyantPolicy(batches, PROFILE.layouts, truth, capacity, LENGTHS)
        assert all(one.drafted >= one.accepted >= 0 for one in runs[-1].drafts)
        share = sum(one.accepted for one in runs[-1].drafts) / sum(
            max(1, one.steps) for one in runs[-1].drafts
        )
        assert (share > 0.5) == (acceptance > 0.5)
        runs = simulate_batches(batches, told, truth, capacity)
        seconds[acceptance, "told"] = sum(run.seconds for run in runs[1:])
    assert seconds[0.7, LENGTHS] < 0.75 * seconds[0.7, (0,)]
    assert seconds[0.02, LENGTHS] < 1.03 * seconds[0.02, (0,)]
    for acceptance in (0.02, 0.7):
        assert seconds[acceptance, LENGTHS] < 1.06 * seconds[acceptance, "told"]


def test_a_tuned_schedule_drafts_less_for_more_requests():
    truth = ReplayedTruth(PROFILE)
    layout = PROFILE.layouts[-1]
    schedule = tuned_schedule(truth, layout, 512, [long_tail(0, 0.5)], LENGTHS)
    assert schedule[0][0] == 1 and schedule[-1][1] == 512
    assert all(last + 1 == first for (_, last, _), (first, _, _) in pairwise(schedule))
    assert schedule[0][2] > schedule[-1][2]
    nothing = tuned_schedule(truth, layout, 512, [long_tail(0, 0.0)], LENGTHS)
    assert {k for _, _, k in nothing} == {0}


def test_a_setting():
    result = run_setting(Setting("A40", requests=32, max_tokens=1024, ranks=2), seeds=1)
    assert result.clairvoyant <= min(result.static, result.pat, result.pat_plain)
    assert result.pat < result.pat_plain
    assert result.fixed < result.plain


def test_wrong_profiles_are_wrong():
    wrong = _believed(PROFILE, "steps x 2")
    for right, other in zip(PROFILE.steps, wrong.steps, strict=True):
        factor = 2 if right.layout == PROFILE.layouts[-1] else 1
        assert other.seconds == factor * right.seconds
    assert _believed(PROFILE, "") is PROFILE


def test_command(tmp_path):
    from benchmarks.layouts_and_drafts import app

    arguments = ["--gpu", "A40", "--requests", "16", "--max-tokens", "512", "--seeds", "1"]
    picture = tmp_path / "batch.png"
    result = CliRunner().invoke(
        app, [*arguments, "--output-dir", str(tmp_path), "--plot", str(picture)]
    )
    assert result.exit_code == 0, result.output
    assert picture.stat().st_size > 10_000
    assert "MODELLED" in (tmp_path / "layouts-and-drafts.md").read_text()

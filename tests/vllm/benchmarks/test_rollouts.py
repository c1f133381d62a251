"""Problems and solutions, drafts by matching suffixes, and their replay."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rollouts.arithmetic import MODULUS, problem, solution
from benchmarks.rollouts.learn import advantages
from benchmarks.rollouts.records import Response, Rollouts
from benchmarks.rollouts.replay import Drafter, draft_ngram, replay_epoch
from benchmarks.rollouts.reward import graded

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def test_most_solutions_are_right_and_none_is_like_another() -> None:
    rng = random.Random(0)
    right = 0
    for _ in range(300):
        one = problem(rng)
        assert 0 <= one.answer < MODULUS
        assert one.text.endswith(("?", "."))
        first, second = solution(rng, one), solution(rng, one)
        assert first != second
        right += graded(first) == one.answer
    assert 200 < right < 300  # some steps are wrong, on purpose
    assert graded("Answer: 1, no. Answer: 23") == 23
    assert graded("23") is None


@given(TEXT, st.integers(1, 3), st.integers(0, 2), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_the_ngram_drafter_is_vllms(text: list[int], shortest: int, more: int, k: int) -> None:
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    tokens = np.array(text, np.int32)
    longest = shortest + more
    theirs = _find_longest_matched_ngram_and_propose_tokens(tokens, shortest, longest, 1000, k)
    out = np.zeros(k, np.int32)
    count, _ = draft_ngram(tokens, shortest, longest, out)
    assert out[:count].tolist() == theirs.tolist()


def rollouts(seed: int, epochs: int = 3, learnt: bool = False) -> Rollouts:
    """Random responses of tokens 0 to 3 to three prompts; `learnt` ones are those of the prompt."""
    rng = random.Random(seed)
    prompts = [np.array([rng.randrange(4) for _ in range(5)], np.int32) for _ in range(3)]
    known = [[rng.randrange(4) for _ in range(30)] for _ in prompts]
    responses = [
        Response(
            prompt,
            epoch,
            np.array(
                known[prompt] if learnt else rng.choices(range(4), k=rng.randrange(1, 30)), np.int32
            ),
            1.0,
            float(rng.random() < 0.5),
            0.5,
            0.7,
        )
        for epoch in range(epochs)
        for prompt in range(3)
        for _ in range(4)
    ]
    return Rollouts(prompts, responses)


@pytest.mark.parametrize("siblings", [False, True])
@pytest.mark.parametrize("visits", [0, 2])
def test_a_replay_gives_every_token_once(siblings: bool, visits: int) -> None:
    one = rollouts(0)
    done = replay_epoch(one, 2, Drafter(visits=visits, siblings=siblings), 4)
    # The last step of a response may lack its bonus token, no other.
    assert set((done.steps + done.accepted - done.tokens).tolist()) <= {0, 1}
    assert (done.accepted <= done.drafted).all()
    assert (done.drafted <= 4 * done.steps).all()
    assert (
        done.matches.sum(0) == [done.steps.sum(), done.drafted.sum(), done.accepted.sum()]
    ).all()


def test_history_is_worth_what_it_repeats_and_another_prompts_is_not() -> None:
    one = rollouts(1, learnt=True)
    own = replay_epoch(one, 1, Drafter(), 4)
    history = replay_epoch(one, 1, Drafter(visits=1), 4)
    placebo = replay_epoch(one, 1, Drafter(visits=1, placebo=True), 4)
    assert history.tokens_per_step > 4
    assert placebo.tokens_per_step < 2
    assert own.tokens_per_step < 2
    # Side by side, equal siblings end together, so that they tell each other nothing here.
    siblings = replay_epoch(one, 1, Drafter(siblings=True), 4)
    assert siblings.tokens_per_step == own.tokens_per_step


def test_rollouts_are_kept_as_they_were(tmp_path: Path) -> None:
    one = rollouts(2)
    one.save(tmp_path / "kept.npz")
    again = Rollouts.load(tmp_path / "kept.npz")
    for a, b in zip(one.prompts, again.prompts, strict=True):
        assert a.tolist() == b.tolist()
    for x, y in zip(one.responses, again.responses, strict=True):
        assert x.tokens.tolist() == y.tokens.tolist()
        assert (x.prompt, x.version, x.reward) == (y.prompt, y.version, y.reward)
    assert [len(epoch) for epoch in again.epochs] == [12, 12, 12]


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    gains = advantages([0, 0, 1, 1, 1], [1, 1, 0, 1, 1])
    assert gains[:2].tolist() == [0, 0]
    assert gains[2] < 0 < gains[3] == gains[4]
    assert gains[2:].sum() == pytest.approx(0, abs=1e-6)

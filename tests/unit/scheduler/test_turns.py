"""Requests that continue ended ones are found by their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.predictor.state import Turn
from pat_vllm.scheduler import turns
from pat_vllm.scheduler.turns import Turns

BLOCK = 4


def blocks(tokens: Sequence[int], salt: int = 0) -> list[int]:
    """A hash of all tokens up to the end of each whole block."""
    return [hash((salt, *tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def arrive(known: Turns, tokens: Sequence[int], salt: int = 0) -> Turn:
    return known.arrived(tokens, blocks(tokens, salt))


def end(known: Turns, turn: Turn, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    known.ended(turn, len(prompt), tokens, blocks(tokens))


lists = st.lists(st.integers(0, 3), max_size=12)


@given(
    st.lists(st.integers(0, 3), min_size=BLOCK, max_size=20), st.lists(lists, max_size=6), st.data()
)
def test_turns_of_a_trajectory_are_counted(
    prompt: list[int], appended: list[list[int]], data: st.DataObject
) -> None:
    known, held = Turns(BLOCK), 0
    tokens = list(prompt)
    first = arrive(known, tokens)
    turn = first
    for index, more in enumerate(appended):
        assert turn == Turn(first.trajectory, index, held)
        response = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=12))
        tokens, begun = tokens + response, tokens
        end(known, turn, begun, tokens)
        held = len(tokens)
        if data.draw(st.booleans()):  # a chat template has its own end of a response
            tokens = [*tokens[:-1], 9]
        tokens = tokens + more
        turn = arrive(known, tokens)


def test_other_requests_are_trajectories_of_their_own() -> None:
    known, prompt = Turns(BLOCK), [1, 2, 3, 4, 5]
    turn = arrive(known, prompt)
    end(known, turn, prompt, [*prompt, 6, 7, 8])
    assert arrive(known, prompt).trajectory != turn.trajectory, "another sample"
    assert arrive(known, [*prompt, 6, 9, 9]).trajectory != turn.trajectory, "another response"
    assert arrive(known, [*prompt, 6, 7, 8], salt=1).trajectory != turn.trajectory
    assert known.arrived([*prompt, 6, 7, 8], []).index == 0, "no prefix caching"
    assert arrive(known, [*prompt, 6, 7, 8]).trajectory == turn.trajectory
    assert arrive(known, [*prompt, 6, 7, 8]).trajectory != turn.trajectory, "it was continued"


def test_a_response_of_one_token_says_nothing() -> None:
    known, prompt = Turns(BLOCK), [1, 2, 3, 4]
    turn = arrive(known, prompt)
    end(known, turn, prompt, [*prompt, 5])
    assert arrive(known, [*prompt, 5, 6]).trajectory != turn.trajectory


def test_samples_with_equal_responses_are_continued_one_by_one() -> None:
    known, prompt = Turns(BLOCK), [1, 2, 3, 4]
    both = [arrive(known, prompt), arrive(known, prompt)]
    for turn in both:
        end(known, turn, prompt, [*prompt, 5, 6])
    continuing = [arrive(known, [*prompt, 5, 6, 7]) for _ in range(3)]
    assert {turn.trajectory for turn in continuing[:2]} == {turn.trajectory for turn in both}
    assert continuing[2].index == 0


def test_the_ones_that_ended_first_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "REMEMBERED_TURNS", 2)
    known = Turns(BLOCK)
    prompts = [[i] * BLOCK for i in range(4)]
    for prompt in prompts:
        end(known, arrive(known, prompt), prompt, [*prompt, 7, 8])
    assert [arrive(known, [*prompt, 7, 8]).index for prompt in prompts] == [0, 0, 1, 1]

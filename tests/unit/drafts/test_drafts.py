"""Responses by prompt, and drafts from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.drafts.corpus import BETWEEN_ROWS, TAIL_TOKENS, Corpus, key_of
from pat_vllm.drafts.suffix import LONGEST, Draft, draft

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def of_rows(own: Sequence[int], rows: Sequence[Sequence[int]], k: int, shortest: int = 1) -> Draft:
    flat = [token for row in rows for token in (BETWEEN_ROWS, *row)]
    return draft(ids(*own), ids(*flat), k, shortest)


def matches(own: Sequence[int], row: Sequence[int]) -> list[tuple[int, list[int]]]:
    """For each place in a row, how long a suffix of `own` ends there, and what follows."""
    found = []
    for end in range(1, len(row)):
        length = 0
        while length < min(end, len(own), LONGEST) and row[end - 1 - length] == own[-1 - length]:
            length += 1
        found.append((length, list(row[end:])))
    return found


@given(TEXT, st.lists(TEXT, max_size=4), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=300, deadline=None)
def test_a_draft_is_what_most_places_of_the_longest_match_agree_on(
    own: list[int], rows: list[list[int]], k: int, shortest: int
) -> None:
    found = [one for row in [*rows, own] for one in matches(own, row)]
    best = max((length for length, _ in found), default=0)
    followers = [after for length, after in found if length == best]
    expected: list[int] = []
    while (
        best >= shortest and len(expected) < k and (followers := [one for one in followers if one])
    ):
        votes = [one[0] for one in followers]
        most = max(map(votes.count, votes))
        expected.append(next(token for token in reversed(votes) if votes.count(token) == most))
        followers = [one[1:] for one in followers if one[0] == expected[-1]]
    done = of_rows(own, rows, k, shortest)
    assert done.tokens.tolist() == expected
    assert done.match == (best if best >= shortest else 0)


def test_votes_and_ties() -> None:
    assert of_rows([9, 1], [[1, 5, 6], [1, 5, 7], [1, 8]], 2).tokens.tolist() == [5, 7]
    assert of_rows([9, 1], [[1, 5], [1, 8]], 1).tokens.tolist() == [8]
    assert of_rows([1, 4, 1], [[1, 5]], 1).tokens.tolist() == [4]  # the own text is the latest
    assert of_rows([9, 1], [[9, 1, 5], [1, 8], [1, 8]], 1).tokens.tolist() == [5]
    # A sibling that is as far as this text has nothing to say.
    assert of_rows([7, 9, 1], [[7, 9, 1], [1, 5]], 1).tokens.tolist() == [5]
    assert of_rows([2, 3], [], 4).tokens.tolist() == []
    assert of_rows([], [[1, 2]], 4).tokens.tolist() == []
    assert of_rows([9, 1], [[1, 5]], 1, shortest=2).tokens.tolist() == []


@given(st.lists(st.tuples(st.integers(0, 3), TEXT), max_size=30), st.integers(100, 2000))
@settings(max_examples=100, deadline=None)
def test_a_corpus_forgets_the_oldest_and_stays_within_its_bytes(
    visits: list[tuple[int, list[int]]], most: int
) -> None:
    corpus = Corpus(most)
    prompts = [ids(*range(10 * n, 10 * n + 9)) for n in range(4)]
    for n, response in visits:
        corpus.add(prompts[n], ids(*response))
        assert corpus.num_bytes <= most
    kept, size = [], 0
    for n, response in reversed(visits):
        size += 4 * (1 + TAIL_TOKENS + len(response))
        if size > most:
            break
        kept.append((n, response))
    for n, prompt in enumerate(prompts):
        mine = [response for m, response in reversed(kept) if m == n]
        rows = [[BETWEEN_ROWS, *prompt[-TAIL_TOKENS:].tolist(), *response] for response in mine]
        assert corpus.visits(key_of(prompt)) == len(mine)
        assert corpus.rows(key_of(prompt)).tolist() == [token for row in rows for token in row]


def test_a_corpus_takes_at_most_five_bytes_a_token_of_usual_responses() -> None:
    corpus = Corpus(1 << 20)
    for _ in range(100):
        corpus.add(ids(*range(30)), ids(*range(100)))
    assert corpus.num_bytes <= 5 * 100 * 100
    assert corpus.visits(key_of(ids(*range(30)))) == 100


def test_the_first_token_is_drafted_from_the_end_of_the_prompt() -> None:
    corpus = Corpus(1 << 10)
    prompt = ids(*range(20))
    corpus.add(prompt, ids(50, 51))
    assert draft(prompt, corpus.rows(key_of(prompt)), 4).tokens.tolist() == [50, 51]

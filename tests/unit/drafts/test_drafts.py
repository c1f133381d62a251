"""Responses by prompt, what ranks have of them, and drafts from them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.drafts.corpus import BETWEEN_ROWS, TAIL_TOKENS, Corpus, key_of
from pat_vllm.drafts.shelf import RowUpdate, Shelf
from pat_vllm.drafts.suffix import draft
from tests.support.suffix import suffix_draft

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def drafted(
    own: Sequence[int], rows: Sequence[Sequence[int]], k: int, shortest: int = 1
) -> tuple[list[int], int]:
    """The draft, and the length of its match."""
    flat, out = [token for row in rows for token in (BETWEEN_ROWS, *row)], np.zeros(k, np.int32)
    count, match = draft(ids(*own), ids(*flat), shortest, out)
    return out[:count].tolist(), match


@given(TEXT, st.lists(TEXT, max_size=4), st.integers(1, 6), st.integers(1, 3))
@settings(max_examples=400, deadline=None)
def test_a_draft_is_what_followed_the_latest_longest_match(
    own: list[int], rows: list[list[int]], k: int, shortest: int
) -> None:
    assert drafted(own, rows, k, shortest) == suffix_draft(own, rows, shortest, k)


def test_matches_and_ties() -> None:
    assert drafted([9, 1], [[1, 5], [1, 8]], 2) == ([8], 1)
    assert drafted([1, 4, 1], [[1, 5]], 1) == ([4], 1)  # the own text is the latest
    assert drafted([9, 1], [[9, 1, 5], [1, 8], [1, 8]], 1) == ([5], 2)
    # A text that is as far as this one has nothing to say.
    assert drafted([7, 9, 1], [[7, 9, 1], [1, 5]], 1) == ([5], 1)
    assert drafted([2, 3], [], 4) == ([], 0)
    assert drafted([], [[1, 2]], 4) == ([], 0)
    assert drafted([9, 1], [[1, 5]], 1, shortest=2) == ([], 0)
    assert drafted([3, 5, 3, 5], [], 5) == ([3, 5, 3, 5, 3], 2)
    assert drafted([3, 5, 6, 3], [], 5) == ([5, 6, 3], 1)  # it ended so once only


# ---------------------------------------------------------------- corpus


@given(st.lists(st.tuples(st.integers(0, 3), TEXT), max_size=30), st.integers(100, 2000))
@settings(max_examples=100, deadline=None)
def test_a_corpus_forgets_the_oldest_and_stays_within_its_bytes(
    visits: list[tuple[int, list[int]]], most: int
) -> None:
    corpus = Corpus(most)
    prompts = [list(range(10 * n, 10 * n + 9)) for n in range(4)]
    for n, response in visits:
        corpus.add(key_of(prompts[n]), prompts[n], response)
        assert corpus.num_bytes <= most
    kept, size = [], 0
    for n, response in reversed(visits):
        size += 4 * (1 + TAIL_TOKENS + len(response))
        if size > most:
            break
        kept.append((n, response))
    for n, prompt in enumerate(prompts):
        responses = [response for m, response in reversed(kept) if m == n]
        rows = corpus.latest(key_of(prompt), 1 << 20, 1 << 10)
        assert [row.tokens.tolist() for row in rows] == [
            [BETWEEN_ROWS, *prompt[-TAIL_TOKENS:], *response] for response in responses
        ]


def test_the_latest_rows_are_those_for_which_there_is_room() -> None:
    corpus, key = Corpus(1 << 10), key_of([1])
    rows = [corpus.add(key, [1], [5] * count) for count in (1, 3, 2)]
    assert corpus.latest(key, 9) == tuple(rows[1:])
    assert corpus.latest(key, 8) == (rows[0], rows[2]), "a long one hides no short one"
    assert corpus.latest(key, 3) == (rows[0],)
    assert corpus.latest(key, 9, max_rows=1) == (rows[2],)
    assert corpus.latest(key, 2) == ()
    assert corpus.latest(key_of([2]), 9) == ()


def test_who_brings_a_salt_shares_with_nobody_else() -> None:
    salts = (None, "a", "b", "a" * 64, "a" * 65)
    assert len({key_of([1, 2], salt) for salt in salts} | {key_of([1])}) == 6


def test_the_first_token_is_drafted_from_the_end_of_the_prompt() -> None:
    corpus, prompt = Corpus(1 << 10), list(range(20))
    row = corpus.add(key_of(prompt), prompt, [50, 51])
    assert drafted(prompt, [row.tokens[1:].tolist()], 4) == ([50, 51], TAIL_TOKENS)


# ---------------------------------------------------------------- shelf


def test_a_shelf_has_the_rows_of_its_requests_and_no_others() -> None:
    draws, shelf = random.Random(3), Shelf()
    tokens = [ids(BETWEEN_ROWS, *range(n, n + 3)) for n in range(12)]
    known: dict[str, tuple[int, ...]] = {}
    for _ in range(300):
        forgotten = tuple(draws.sample(sorted(known), draws.randint(0, min(2, len(known)))))
        requests = {
            f"r{draws.randrange(6)}": tuple(draws.sample(range(12), draws.randint(1, 4)))
            for _ in range(draws.randint(0, 3))
        }
        needed = {row for rows in requests.values() for row in rows}
        version = shelf.version
        missing = {row: tokens[row] for row in needed if row not in shelf}
        shelf.take(RowUpdate(forgotten, missing, requests))
        known = {
            request: rows for request, rows in known.items() if request not in forgotten
        } | requests
        assert shelf.version != version
        assert set(shelf) == set(known)
        of_requests = {row for rows in known.values() for row in rows}
        assert {row for row in range(12) if row in shelf} == of_requests
        for request, rows in known.items():
            assert shelf.ids_of(request) == rows
            expected = np.concatenate([tokens[row] for row in rows])
            assert (shelf.text_of(request) == expected).all()
    assert len(shelf.text_of("unknown")) == 0

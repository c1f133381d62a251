"""What followed the longest suffix of a text, in it and in others, by vote."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pat_vllm.drafts.corpus import BETWEEN_ROWS

LONGEST = 32
"""Tokens of a match beyond which longer ones are not told apart."""


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next.

    Attributes:
        tokens: int32 `[at most k]`.
        match: tokens of the suffix that was found elsewhere; 0 is none, and then no draft.
        votes: places where it was found.
    """

    tokens: np.ndarray
    match: int
    votes: int


def draft(own: np.ndarray, others: np.ndarray, k: int, shortest: int = 1) -> Draft:
    """Draft up to `k` tokens after `own`.

    The places where its longest suffix ends vote on each token; those that disagree with the tokens
    drafted so far no longer do. Of equally many votes those of the later place count, and `own`
    comes after `others`.

    Args:
        own: int32 `[tokens]`, the prompt and what was generated.
        others: int32 `[tokens]` of texts, each behind `BETWEEN_ROWS`; the latest last.
        shortest: tokens of a match below which nothing is drafted.
    """
    text = np.concatenate([others, [BETWEEN_ROWS], own]).astype(np.int32)
    last = len(text) - 1
    # A place that nothing follows proposes nothing, however long the match.
    proposes = text[1:] != BETWEEN_ROWS
    places = np.flatnonzero((text[:last] == text[last]) & proposes) if len(own) else text[:0]
    match = 0
    while len(places):
        found, match = places, match + 1
        # `BETWEEN_ROWS` in front of every text equals no token, so that nothing is read before.
        if match == min(LONGEST, len(own)):
            break
        places = found[text[found - match] == text[last - match]]
    if match < max(1, shortest):
        return Draft(np.empty(0, np.int32), 0, 0)
    return Draft(_elected(text, found, k), match, len(found))


def _elected(text: np.ndarray, places: np.ndarray, k: int) -> np.ndarray:
    """The tokens that most of the places agree on, one after the other."""
    tokens: list[int] = []
    at = places + 1
    while len(tokens) < k:
        at = at[at < len(text)]
        next_tokens = text[at]
        # A text ends where the next one begins.
        alive = next_tokens != BETWEEN_ROWS
        at, next_tokens = at[alive], next_tokens[alive]
        if not len(at):
            break
        # Backwards, so that the first of equal ones is the latest.
        values, latest, votes = np.unique(next_tokens[::-1], return_index=True, return_counts=True)
        winner = values[np.lexsort((latest, -votes))[0]]
        tokens.append(int(winner))
        at = at[next_tokens == winner] + 1
    return np.array(tokens, np.int32)

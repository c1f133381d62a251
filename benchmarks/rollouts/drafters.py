"""Drafting by matching suffixes, and its replay on responses that are known. Compiled by numba.

A corpus is flat token ids in rows; a row is a prompt and a response to it, of which so far some
tokens exist. A draft is what followed the row's longest suffix elsewhere, by vote.
"""

from __future__ import annotations

import numpy as np
from numba import njit

OWN, SIBLINGS, HISTORY = 0, 1, 2
"""Sources of a draft token: where the first match that voted for it lies."""
MATCH_BUCKETS = 12
"""Match lengths 0, 1, 2-3, 4-7 and so on, by powers of two."""


@njit(cache=True)
def draft_ngram(flat, start, end, k, shortest, longest, out):  # type: ignore[no-untyped-def]
    """As vLLM's n-gram drafter: the earliest place of the longest n-gram within bounds.

    Args:
        flat: int32, of which the request's tokens are `start:end`.
        out: int32 `[k]`, for the draft.

    Returns:
        Tokens of the draft, and the length of the match.
    """
    best, place = 0, -1
    for at in range(start, end - 1):
        length = 0
        while (
            length < longest
            and at - length >= start
            and flat[at - length] == flat[end - 1 - length]
        ):
            length += 1
        if length > best:
            best, place = length, at
    if best < shortest:
        return 0, 0
    count = min(k, end - 1 - place)
    for i in range(count):
        out[i] = flat[place + 1 + i]
    return count, best


@njit(cache=True)
def draft_vote(  # type: ignore[no-untyped-def]
    flat, starts, firsts, ends, rows, own, k, shortest, longest, base, least, out, scratch, votes
):
    """What followed the longest suffix of row `own` in all rows, by weighted vote.

    A match of length n has `base ** n` votes; with a large base only the longest ones count. The
    matches that disagree with a token that was drafted do not vote on the next.

    Args:
        flat: int32 tokens of all rows.
        starts, firsts, ends: of each row, where it begins, where its response does, and where what
            exists of it ends. Of other rows than `own` only what is in responses is drafted.
        rows: indices of the rows to look at; the last one is the first to win a tie.
        shortest, longest: of matches that count, and that are told apart.
        least: share of the votes below which a token is not drafted.
        out: int32 `[k]`, for the draft.
        scratch: int32 `[3, tokens]`, as many as `flat` has.
        votes: float64 `[vocabulary]`, all zero, before and after.

    Returns:
        Tokens of the draft, and the length of the longest match.
    """
    last = ends[own] - 1
    begin = starts[own]
    places, lengths, limits = scratch
    found, best = 0, 0
    for row in rows:
        lowest = starts[row]
        low = lowest if row == own else max(lowest, firsts[row] - 1)
        for at in range(low, ends[row] - 1):
            if flat[at] != flat[last]:
                continue
            length = 1
            while (
                length < longest
                and at - length >= lowest
                and last - length >= begin
                and flat[at - length] == flat[last - length]
            ):
                length += 1
            if length >= shortest:
                places[found], lengths[found], limits[found] = at + 1, length, ends[row]
                found += 1
                best = max(best, length)
    count = 0
    while count < k and found:
        total = 0.0
        for i in range(found):
            weight = base ** (lengths[i] - best)
            votes[flat[places[i] + count]] += weight
            total += weight
        winner, most = -1, 0.0
        for i in range(found - 1, -1, -1):
            token = flat[places[i] + count]
            if votes[token] > most:
                winner, most = token, votes[token]
        for i in range(found):
            votes[flat[places[i] + count]] = 0.0
        if most < least * total:
            break
        out[count] = winner
        count += 1
        kept = 0
        for i in range(found):
            at = places[i] + count
            if flat[at - 1] == winner and at < limits[i]:
                places[kept], lengths[kept], limits[kept] = places[i], lengths[i], limits[i]
                kept += 1
        found = kept
    return count, best


@njit(cache=True)
def replay(  # type: ignore[no-untyped-def]
    flat, starts, firsts, totals, count, siblings, ngram, k, shortest, longest, base, least
):
    """Rows `0:count` are generated side by side, all others exist; each step drafts and verifies.

    A draft token that is drawn from a point mass is accepted with the probability of that token, so
    on a recorded response it is accepted exactly if it is the recorded token.

    Args:
        totals: where each row ends when it is complete.
        siblings: whether rows that are being generated may draw on each other.
        ngram: draft as vLLM's n-gram drafter does, from the own row.
        k, shortest, longest, base, least: of the drafter.

    Returns:
        Of each row int64 `[count, 3]` its decode steps, draft tokens verified and accepted; and
        by the match's bucket int64 `[MATCH_BUCKETS, 3]` steps, verified, accepted.
    """
    ends = totals.copy()
    for row in range(count):
        ends[row] = min(firsts[row] + 1, totals[row])  # prefill makes the first token
    size = len(flat)
    scratch, out = np.empty((3, size), np.int32), np.empty(k, np.int32)
    votes = np.zeros(flat.max() + 1, np.float64)
    result = np.zeros((count, 3), np.int64)
    buckets = np.zeros((MATCH_BUCKETS, 3), np.int64)
    others = len(starts) - count
    rows = np.empty(len(starts), np.int64)
    for i in range(others):
        rows[i] = count + i
    gained = np.zeros(count, np.int64)
    while True:
        going = 0
        for own in range(count):
            gained[own] = 0
            if ends[own] >= totals[own]:
                continue
            going += 1
            if ngram:
                drafted, match = draft_ngram(
                    flat, starts[own], ends[own], k, shortest, longest, out
                )
            else:
                used = others
                if siblings:
                    for row in range(count):
                        if row != own:
                            rows[used] = row
                            used += 1
                rows[used] = own
                drafted, match = draft_vote(
                    flat, starts, firsts, ends, rows[: used + 1], own, k, shortest, longest, base,
                    least, out, scratch, votes,
                )  # fmt: skip
            accepted, room = 0, totals[own] - ends[own]
            while accepted < min(drafted, room) and out[accepted] == flat[ends[own] + accepted]:
                accepted += 1
            gained[own] = min(accepted + 1, room)
            bucket = 0
            while match > 0 and bucket < MATCH_BUCKETS - 1:
                bucket, match = bucket + 1, match // 2
            for table, at in ((result, own), (buckets, bucket)):
                table[at, 0] += 1
                table[at, 1] += drafted
                table[at, 2] += accepted
        if not going:
            return result, buckets
        for own in range(count):
            ends[own] += gained[own]

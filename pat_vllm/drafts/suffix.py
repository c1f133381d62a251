"""What followed a text's longest suffix, in it and in others. Compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from pat_vllm.drafts.corpus import BETWEEN_ROWS, LONGEST

_BETWEEN = np.int32(BETWEEN_ROWS)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile by numba, and keep what it makes for the next process where a folder allows it."""
    try:
        return njit(cache=True)(function)
    except RuntimeError:  # neither this file's folder nor the user's can be written to
        return njit(function)


@compiled
def draft(own, others, shortest, out):  # type: ignore[no-untyped-def]
    """Draft what followed the longest suffix of `own`; of equally long ones, the latest place.

    `own` comes after `others`. A text whose end repeats itself is drafted to go on so.

    Args:
        own: int32 [tokens], the prompt and what was generated.
        others: int32 [tokens] of texts, each behind `BETWEEN_ROWS`; the latest last.
        shortest: tokens of a match below which nothing is drafted; at least 1.
        out: int32 [k], for the draft.

    Returns:
        Tokens of the draft, at most k; and of the match, 0 where it is too short.
    """
    size, k = len(own), len(out)
    best, place, in_own = shortest - 1, -1, True
    for at in range(size - 2, -1, -1):
        if own[at] != own[size - 1]:
            continue
        match = 1
        while match < LONGEST and match <= at and own[at - match] == own[size - 1 - match]:
            match += 1
        if match > best:
            best, place = match, at
            if best == LONGEST:
                break
    if best < LONGEST and size:
        for at in range(len(others) - 2, -1, -1):
            if others[at] != own[size - 1] or others[at + 1] == _BETWEEN:
                continue
            match = 1
            while match < min(LONGEST, size) and others[at - match] == own[size - 1 - match]:
                match += 1
            if match > best:
                best, place, in_own = match, at, False
                if best == LONGEST:
                    break
    if place < 0:
        return 0, 0
    count = 0
    if in_own:
        period = size - 1 - place
        while count < k and (count < period or best >= period):
            out[count] = own[place + 1 + count % period]
            count += 1
    else:
        while (
            count < k and place + 1 + count < len(others) and others[place + 1 + count] != _BETWEEN
        ):
            out[count] = others[place + 1 + count]
            count += 1
    return count, best

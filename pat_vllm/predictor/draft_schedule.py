"""Speculative decoding: the draft lengths that an engine keeps ready. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Schedule = Sequence[tuple[int, int, int]]
"""vLLM's `num_speculative_tokens_per_batch_size`: (first batch size, last, draft length)."""


def ngram_config(longest: int, method: str = "ngram") -> dict[str, Any]:
    """A `speculative_config` of vLLM's for drafts of up to `longest` tokens that follow n-grams.

    Args:
        method: one of `OF_TEXT` in `models/drafters.py`.
    """
    return {
        "method": method,
        "num_speculative_tokens": longest,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


def draft_lengths(longest: int, schedule: Schedule | None) -> tuple[int, ...]:
    """The draft lengths among which an engine can change at any time, ascending.

    They are 0, the powers of two up to the longest, the longest itself, and what the user's own
    schedule names. vLLM captures CUDA graphs for each of them, so there are not more.

    Args:
        longest: vLLM's `num_speculative_tokens`.
        schedule: the user's, if any.
    """
    lengths = {0, longest, *(1 << power for power in range(max(0, longest - 1).bit_length()))}
    return tuple(sorted(lengths | {min(longest, length) for _, _, length in schedule or ()}))


def every_length(lengths: Iterable[int]) -> list[tuple[int, int, int]]:
    """A schedule in which each draft length occurs, the longest for all large batches.

    A model runner prepares itself for the lengths that its schedule names. Which is used when is
    decided by the schedulers.
    """
    return [(batch, batch, length) for batch, length in enumerate(sorted(lengths), 1)]

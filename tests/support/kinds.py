"""Kinds of state: for tests that are about something else, and one that lives in tests alone."""

from __future__ import annotations

from dataclasses import dataclass

from pat_vllm.models.kinds import FullAttention, StateKind


def full(heads: int, block_size: int = 16) -> tuple[StateKind, ...]:
    """One group of full attention with so many KV heads."""
    return (FullAttention(heads, block_size),)


@dataclass(frozen=True)
class LaterHalf(StateKind):
    """A token attends to the later half of those before it. PAT knows nothing of this kind.

    `tests/vllm/scheduler/later_half.py` has what vLLM is told of it.
    """

    title = "later halves"
    spec_name = "LaterHalfSpec"

    def skipped(self, tokens: int) -> int:
        return tokens // 2

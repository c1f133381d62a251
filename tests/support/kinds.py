"""Kinds of state: for tests that are about something else, and one that lives in tests alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pat_vllm.kinds import FullAttention, StateKind


def full(heads: int, block_size: int = 16) -> tuple[StateKind, ...]:
    """One group of full attention with so many KV heads."""
    return (FullAttention(heads, block_size),)


@dataclass(frozen=True)
class LaterHalf(StateKind):
    """A token attends to the later half of those before it. PAT knows nothing of this kind.

    `tests/vllm/scheduler/later_half.py` has what vLLM is told of it.
    """

    title = "later halves"

    @classmethod
    def serves(cls, spec: Any) -> bool:
        return type(spec).__name__ == "LaterHalfSpec"

    def held(self, tokens: int) -> range:
        return range(tokens // 2 // self.block_size, -(-tokens // self.block_size))

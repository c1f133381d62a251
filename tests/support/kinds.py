"""Kinds of state: for tests that are about something else, and one that lives in tests alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pat_vllm.kinds import FullAttention, StateKind


def full(heads: int, block_size: int = 16) -> tuple[StateKind, ...]:
    """One group of full attention with so many KV heads."""
    return (FullAttention(heads, block_size),)


@dataclass(frozen=True)
class ChunkedAttention(StateKind):
    """A token attends to those of its chunk up to itself. PAT knows nothing of this kind.

    Attributes:
        chunk: tokens.
    """

    chunk: int = 1

    title = "chunked attention"

    @classmethod
    def serves(cls, spec: Any) -> bool:
        return type(spec).__name__ == "ChunkedLocalAttentionSpec"

    @classmethod
    def of(cls, spec: Any, **sizes: int) -> StateKind:
        return cls(block_size=spec.block_size, chunk=spec.attention_chunk_size, **sizes)

    def held(self, tokens: int) -> range:
        return range(
            tokens // self.chunk * self.chunk // self.block_size, -(-tokens // self.block_size)
        )

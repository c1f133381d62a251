"""Responses to earlier prompts, which drafts are made from; bounded in bytes."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

BETWEEN_ROWS = -1
"""Before each row; no token has this id, so no match reaches over it and no draft goes beyond."""
LONGEST = 32
"""Tokens of a match beyond which longer ones are not told apart."""
TAIL_TOKENS = 8
"""Tokens of the prompt before each response in its row, so that its first tokens are found, too."""
MOST_ROWS = 128
"""Rows that a request drafts from, at most: short responses to one prompt may be many."""
_TOKEN_BYTES = 4

Key = bytes
KEY_BYTES = 16


def key_of(prompt: Sequence[int], salt: str | None = None) -> Key:
    """What a prompt is known by; `salt` is vLLM's `cache_salt`, which keeps users apart."""
    text = np.asarray(prompt, np.int32).tobytes()
    apart = hashlib.blake2b(salt.encode(), digest_size=32).digest() if salt else b""
    return hashlib.blake2b(text, digest_size=KEY_BYTES, key=apart).digest()


@dataclass(frozen=True, eq=False)
class Row:
    """An earlier response, after the end of its prompt, for drafters to copy from.

    Attributes:
        id: no other row of the corpus has or had it.
        tokens: `BETWEEN_ROWS`, the last tokens of the prompt, and the response, int32 [tokens].
    """

    id: int
    tokens: np.ndarray = field(repr=False)


class Corpus:
    """Responses by prompt. The oldest are forgotten first, whatever prompt they are to."""

    def __init__(self, max_bytes: int) -> None:
        """An empty one.

        Args:
            max_bytes: of all rows together.
        """
        self._max_bytes = max_bytes
        self._bytes = 0
        self._added = 0
        self._rows: dict[Key, deque[Row]] = {}
        self._ages: deque[Key] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tokens of all rows together."""
        return self._bytes

    @property
    def num_added(self) -> int:
        """Rows that were added so far, also those that are forgotten."""
        return self._added

    def add(self, key: Key, prompt: Sequence[int], response: Sequence[int]) -> Row:
        """Take a response up, and forget old ones for which there is no room.

        Args:
            prompt: its last tokens, at least `TAIL_TOKENS` of them where there are as many.
        """
        tokens = np.array([BETWEEN_ROWS, *prompt[-TAIL_TOKENS:], *response], np.int32)
        return self.restore(key, tokens)

    def items(self) -> list[tuple[Key, Row]]:
        """All rows with what their prompts are known by, the oldest first."""
        rows = {key: iter(of_key) for key, of_key in self._rows.items()}
        return [(key, next(rows[key])) for key in self._ages]

    def restore(self, key: Key, tokens: np.ndarray) -> Row:
        """Take up the tokens of a row: of a new one, or of one from an earlier corpus."""
        row = Row(self._added, tokens)
        self._added += 1
        self._rows.setdefault(key, deque()).append(row)
        self._ages.append(key)
        self._bytes += _TOKEN_BYTES * len(row.tokens)
        self.forget_to(self._max_bytes)
        return row

    def forget_to(self, max_bytes: int) -> None:
        """Forget the oldest until the others have at most so many bytes."""
        while self._bytes > max_bytes:
            key = self._ages.popleft()
            rows = self._rows[key]
            self._bytes -= _TOKEN_BYTES * len(rows.popleft().tokens)
            if not rows:
                del self._rows[key]

    def latest(self, key: Key, max_tokens: int, max_rows: int = MOST_ROWS) -> tuple[Row, ...]:
        """The latest responses to a prompt, with at most so many tokens in all, the latest last;
        those that do not fit are left out.
        """
        rows: list[Row] = []
        for row in reversed(self._rows.get(key, ())):
            if len(rows) == max_rows:
                break
            if len(row.tokens) <= max_tokens:
                max_tokens -= len(row.tokens)
                rows.append(row)
        return tuple(reversed(rows))

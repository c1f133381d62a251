"""Responses by prompt, bounded in bytes."""

from __future__ import annotations

import hashlib
from collections import deque

import numpy as np

BETWEEN_ROWS = -1
"""Between rows; no token has this id, so no match reaches over it and no draft goes beyond."""
TAIL_TOKENS = 8
"""Of the prompt, before each response, so that its first tokens are found, too."""
_TOKEN_BYTES = 4

Key = bytes


def key_of(prompt: np.ndarray) -> Key:
    """What a prompt is known by.

    Args:
        prompt: int32 `[tokens]`.
    """
    return hashlib.blake2b(
        np.ascontiguousarray(prompt, np.int32).tobytes(), digest_size=16
    ).digest()


class Corpus:
    """Responses by prompt. The oldest are forgotten first, whatever prompt they are to."""

    def __init__(self, max_bytes: int) -> None:
        """An empty one.

        Args:
            max_bytes: of all rows together.
        """
        self._max_bytes = max_bytes
        self._bytes = 0
        self._rows: dict[Key, deque[np.ndarray]] = {}
        self._ages: deque[Key] = deque()
        self._flat: dict[Key, np.ndarray] = {}

    @property
    def num_bytes(self) -> int:
        """Of all rows together."""
        return self._bytes

    def add(self, prompt: np.ndarray, response: np.ndarray) -> None:
        """Take a response up, and forget old ones for which there is no room.

        Args:
            prompt, response: int32 `[tokens]`.
        """
        key = key_of(prompt)
        row = np.concatenate([[BETWEEN_ROWS], prompt[-TAIL_TOKENS:], response]).astype(np.int32)
        self._rows.setdefault(key, deque()).append(row)
        self._ages.append(key)
        self._flat.pop(key, None)
        self._bytes += _TOKEN_BYTES * len(row)
        while self._bytes > self._max_bytes:
            self._forget_oldest()

    def visits(self, key: Key) -> int:
        """Responses that are kept of a prompt."""
        return len(self._rows.get(key, ()))

    def rows(self, key: Key) -> np.ndarray:
        """The responses that are kept of a prompt, the latest last, each behind `BETWEEN_ROWS`.

        Returns:
            int32 `[tokens]`, not to be changed.
        """
        if key not in self._flat:
            rows = self._rows.get(key)
            if not rows:
                return np.empty(0, np.int32)
            self._flat[key] = np.concatenate(rows)
        return self._flat[key]

    def _forget_oldest(self) -> None:
        key = self._ages.popleft()
        rows = self._rows[key]
        self._bytes -= _TOKEN_BYTES * len(rows.popleft())
        self._flat.pop(key, None)
        if not rows:
            del self._rows[key]

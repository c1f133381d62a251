"""The earlier responses that a rank has, for its drafters, and the messages that bring them.

A row is such a response, after a separator and the end of its prompt (`corpus.Row`). The engine
core keeps a shelf for each rank that equals the rank's own, so it knows what to send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

RowIds = tuple[int, ...]


@dataclass(frozen=True)
class RowUpdate:
    """What the ranks of a replica have to know of rows before a step.

    Attributes:
        forgotten: ids of requests that are not in this replica any more.
        rows: tokens of rows that some rank lacks, by id, int32 [tokens].
        of_requests: ids of each request's rows, in their order.
    """

    forgotten: tuple[str, ...] = ()
    rows: Mapping[int, np.ndarray] = field(default_factory=dict)
    of_requests: Mapping[str, RowIds] = field(default_factory=dict)


class Shelf:
    """Rows of the requests of a rank, each once. A row goes with the last request that has it.

    Attributes:
        version: changes with each update.
    """

    def __init__(self) -> None:
        self.version = 0
        self._rows: dict[int, np.ndarray] = {}
        self._of: dict[str, RowIds] = {}
        self._users: Counter[RowIds] = Counter()
        self._flat: dict[RowIds, np.ndarray] = {}

    def __iter__(self) -> Iterator[str]:
        """Ids of the requests that have rows."""
        return iter(self._of)

    def __contains__(self, row: int) -> bool:
        """Whether a row is here."""
        return row in self._rows

    def take(self, update: RowUpdate) -> None:
        """Apply an update."""
        self.version += 1
        left = [
            self._of.pop(request_id) for request_id in update.forgotten if request_id in self._of
        ]
        left += [
            self._of[request_id] for request_id in update.of_requests if request_id in self._of
        ]
        self._rows.update(update.rows)
        self._of.update(update.of_requests)
        self._users.update(update.of_requests.values())
        self._users.subtract(left)
        if gone := {ids for ids in left if not self._users[ids]}:
            for ids in gone:
                del self._users[ids]
                self._flat.pop(ids, None)
            kept = {row for ids in self._users for row in ids}
            self._rows = {row: tokens for row, tokens in self._rows.items() if row in kept}

    def ids_of(self, request_id: str) -> RowIds:
        """Ids of the request's rows; none where the request is unknown."""
        return self._of.get(request_id, ())

    def text_of(self, request_id: str) -> np.ndarray:
        """The request's rows, one after the other, int32 [tokens]; not to be changed."""
        ids = self.ids_of(request_id)
        if not ids:
            return np.empty(0, np.int32)
        if ids not in self._flat:
            self._flat[ids] = np.concatenate([self._rows[row] for row in ids])
        return self._flat[ids]

"""Sequences of collectives, one of each rank, and whether they can be carried out."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """A call of a rank.

    Attributes:
        phase: of the rank's life, "start" for instance.
        group, ranks: name of the process group, and its global ranks.
        waits: whether all of them have to make the call; not those that ask about devices.
        devices: indices of the devices that it is about.
        constructs: whether it makes something that lasts, such as a communicator.
        detail: what else has to be the same on all ranks.
    """

    rank: int
    phase: str
    kind: str
    group: str
    ranks: tuple[int, ...]
    waits: bool = True
    devices: tuple[int, ...] = ()
    constructs: bool = False
    detail: str = ""

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Event:
        """An event, from JSON."""
        lists = {name: tuple(fields[name]) for name in ("ranks", "devices")}
        return cls(**(fields | lists))

    def meets(self, other: Event) -> bool:
        """Whether the two are one call, on two ranks."""
        own = self.kind, self.group, self.ranks, self.detail
        return own == (other.kind, other.group, other.ranks, other.detail)


class Merge:
    """Carries calls out, a sequence of each rank, if all ranks that take part have come to them.

    That is one order of the calls of all ranks. Where there is none, ranks wait for ever.
    """

    def __init__(self, sequences: Iterable[Iterable[Event]]) -> None:
        self.done: list[Event] = []
        self._queues = [deque(event for event in rank if event.waits) for rank in sequences]
        while ready := self._next():
            self.done.append(ready)
            for rank in ready.ranks:
                self._queues[rank].popleft()

    def _next(self) -> Event | None:
        return next(filter(self._all_are_there, self.waiting.values()), None)

    def _all_are_there(self, event: Event) -> bool:
        queues = [self._queues[rank] for rank in event.ranks]
        return all(queue and queue[0].meets(event) for queue in queues)

    @property
    def waiting(self) -> dict[int, Event]:
        """What each rank waits in, of those that wait."""
        return {rank: queue[0] for rank, queue in enumerate(self._queues) if queue}

    def stuck(self, ended: Collection[int]) -> bool:
        """Whether ranks wait for each other, or for ranks that have ended, and so for ever."""
        waiting = self.waiting
        return bool(waiting) and all(
            rank in waiting or rank in ended for rank in range(len(self._queues))
        )

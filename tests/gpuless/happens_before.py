"""Accesses to the same bytes that nothing orders: vector clocks of streams and of hosts' threads.

An actor is a stream or a thread of a host; what it does is done in order. Its clock says which work
of every actor is over when its own next work begins. Two accesses to a byte, of which one writes,
are a race if the later one's actor did not know that the earlier one was over. Giving memory back
is an access, too: its bytes go to the next who allocates on the same stream.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_IMITATION = ("happens_before", "streams", "devices", "nccl", "launches")
_UNSEEN = (
    *(f"/gpuless/{name}.py" for name in _IMITATION),
    *("/torch/", "/contextlib.py", "/threading.py", "/weakref.py", "/concurrent/"),
)


class Actor:
    """A stream, or a thread of a host.

    Attributes:
        clock: how much of the work of each actor, by name, is over when the next of this begins.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[str, int] = {name: 0}

    def knows(self, clock: Mapping[str, int]) -> None:
        """What this actor does from now on comes after all that a clock says."""
        for name, tick in clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))

    def tick(self) -> int:
        """Begin the next piece of work; returns its number."""
        self.clock[self.name] += 1
        return self.clock[self.name]

    def saw(self, access: Access) -> bool:
        """Whether that was over before this actor's present work."""
        return self.clock.get(access.actor, 0) >= access.tick


@dataclass(frozen=True)
class Access:
    """What work number `tick` of an actor did with some memory."""

    actor: str
    tick: int
    writes: bool
    place: str

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} by {self.actor} at {self.place}"


@dataclass(frozen=True)
class Part:
    """Some bytes of a memory.

    Attributes:
        start: the first, counted from the memory's beginning.
        shape, strides: of an array of single bytes that lies there; strides in bytes.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def flat(cls, start: int, size: int) -> Part:
        """Consecutive bytes."""
        return cls(start, (size,), (1,))

    @classmethod
    def of(cls, tensor: torch.Tensor, memory: Memory) -> Part:
        """Those of a tensor, exactly."""
        size = tensor.element_size()
        start = tensor.data_ptr() - memory.address
        return cls(start, (*tensor.shape, size), (*(size * s for s in tensor.stride()), 1))

    def within(self, values: np.ndarray) -> np.ndarray:
        """These bytes' elements of a flat array that has one for each byte of the memory."""
        strides = tuple(values.itemsize * stride for stride in self.strides)
        return np.lib.stride_tricks.as_strided(values[self.start :], self.shape, strides)


@dataclass(frozen=True)
class Freed:
    """Memory that was given back while somebody may have used it."""

    place: str
    users: tuple[Access, ...]


class Memory(bytearray):
    """Memory that tells when it is given back, with the last accesses to each byte.

    Attributes:
        stream: on which it was allocated; None if it is pinned memory of the host.
        recorded: names of the streams whose work is waited for when it is given back.
    """

    def __init__(self, size: int, races: Races, stream: Actor | None) -> None:
        super().__init__(max(-(-size // 16), 1) * 16)
        self.address = int(torch.frombuffer(self, dtype=torch.uint8).data_ptr())
        self.stream = stream
        self.recorded = set[str]() if stream is None else {stream.name}
        self.before = races.freed_on(stream) if stream else []
        self.last: dict[str, Access] = {}
        self._races = races
        self._written = np.zeros(len(self), np.int32)
        self._read: dict[str, np.ndarray] = {}

    def __del__(self) -> None:
        self._races.give_back(self)

    def conflicts(self, part: Part, writes: bool) -> Iterator[int]:
        """Numbers of the last accesses to these bytes that must be over before the next."""
        every = [self._written, *self._read.values()] if writes else [self._written]
        for numbers in every:
            yield from (int(number) for number in np.unique(part.within(numbers)) if number)

    def note(self, part: Part, access: Access, number: int) -> None:
        """Remember an access, the last one to these bytes."""
        self.last[access.actor] = access
        if not access.writes:
            if access.actor not in self._read:
                self._read[access.actor] = np.zeros(len(self), np.int32)
            part.within(self._read[access.actor])[...] = number
            return
        part.within(self._written)[...] = number
        for numbers in self._read.values():
            part.within(numbers)[...] = 0


class Races:
    """Looks at every access.

    Attributes:
        found: the races, each pair of places once.
        hosts: gives the threads that use the present device; none where there is no device. What
            one of them knows to be over is over, if memory is given back then.
    """

    def __init__(self, hosts: Callable[[], Sequence[Actor]]) -> None:
        self.hosts = hosts
        self.found: list[str] = []
        self._accesses: dict[int, Access] = {}
        self._numbers = itertools.count(1)
        self._freed: dict[str, list[Freed]] = defaultdict(list)
        self._seen: set[tuple[str, ...]] = set()

    def access(self, actor: Actor, memory: Memory, part: Part, writes: bool) -> None:
        """An actor's present work reads or writes part of a memory."""
        if not all(part.shape):
            return
        access = Access(actor.name, actor.clock[actor.name], writes, place())
        for number in memory.conflicts(part, writes):
            earlier = self._accesses[number]
            if not actor.saw(earlier):
                self._report("nothing orders", earlier, access)
        for freed in memory.before:
            for user in freed.users:
                if not actor.saw(user):
                    self._report(f"memory given back at {freed.place} too early:", user, access)
        memory.before = []
        number = next(self._numbers)
        self._accesses[number] = access
        memory.note(part, access, number)

    def freed_on(self, stream: Actor) -> list[Freed]:
        """What the next memory of a stream may lie over, of what others may still use."""
        kept = [
            freed
            for freed in self._freed[stream.name]
            if not all(stream.saw(user) for user in freed.users)
        ]
        self._freed[stream.name] = kept
        return list(kept)

    def give_back(self, memory: Memory) -> None:
        """Nobody refers to a memory any more."""
        hosts = self.hosts()
        if memory.stream is None or not hosts:
            return
        users = tuple(
            user
            for user in memory.last.values()
            if user.actor not in memory.recorded and not any(host.saw(user) for host in hosts)
        )
        if users:
            self._freed[memory.stream.name].append(Freed(place(), users))

    def overlap(self, what: str) -> None:
        """Programs of one launch, which nothing orders, access the same bytes."""
        self.found.append(f"programs of a launch overlap: {what} at {place()}")

    def _report(self, why: str, earlier: Access, later: Access) -> None:
        pair = (why, earlier.place, str(earlier.writes), later.place, str(later.writes))
        if pair not in self._seen:
            self._seen.add(pair)
            self.found.append(f"{why} {earlier} and {later}")


def disjoint(ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether (first, end) ranges of addresses share no byte."""
    ordered = sorted(ranges)
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))


def place() -> str:
    """The innermost line of the present work that is neither torch's nor the imitation's."""
    frame = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in _UNSEEN) and frame.f_back:
        frame = frame.f_back
    file = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"

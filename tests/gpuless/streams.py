"""CUDA's streams and events, imitated: what is queued is done at once.

Clocks tell in which order a device might have done it; see `happens_before.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.gpuless.happens_before import Actor

here = threading.local()
"""`thread`: what runs now. `unseen`: whether accesses are the imitation's own."""


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device_of = here.thread.device
        self.cuda_stream = len(self.device_of.streams)
        self.actor = Actor(f"rank {self.device_of.index} stream {self.cuda_stream}")
        self.device_of.streams.append(self)

    def work(self) -> Actor:
        """Queue a piece of work, whose accesses are to be told."""
        self.actor.knows(here.thread.host.clock)
        self.actor.tick()
        return self.actor

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        here.thread.host.knows(self.actor.clock)


class Event:
    """In place of `torch.cuda.Event`. One that was not recorded is not waited for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._clock: dict[str, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self._clock = dict((stream or current_stream()).actor.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).actor.knows(self._clock)

    def synchronize(self) -> None:
        here.thread.host.knows(self._clock)


@dataclass
class Device:
    """One rank's."""

    index: int
    streams: list[Stream] = field(default_factory=list)
    hosts: list[Actor] = field(default_factory=list)
    main: Thread = None  # type: ignore[assignment]


@dataclass
class Thread:
    """A thread of the host that uses a device."""

    device: Device
    host: Actor
    current: Stream = None  # type: ignore[assignment]


def current_stream(device: Any = None) -> Stream:
    """As in `torch.cuda`."""
    stream: Stream = here.thread.current
    return stream


def set_stream(stream: Stream) -> None:
    """As in `torch.cuda`."""
    here.thread.current = stream


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """`torch.cuda.stream`."""
    previous = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(previous)


def synchronize(device: Any = None) -> None:
    """As in `torch.cuda`."""
    for stream in here.thread.device.streams:
        stream.synchronize()


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, no access counts."""
    before = getattr(here, "unseen", False)
    here.unseen = True
    try:
        yield
    finally:
        here.unseen = before


class Queue:
    """In place of `queue.SimpleQueue`. Who takes an item knows what was known when it was put."""

    def __init__(self) -> None:
        self._items: list[tuple[dict[str, int], Any]] = []
        self._more = threading.Semaphore(0)

    def put(self, item: Any) -> None:
        self._items.append((dict(here.thread.host.clock), item))
        self._more.release()

    def get(self) -> Any:
        self._more.acquire()
        clock, item = self._items.pop(0)
        here.thread.host.knows(clock)
        return item

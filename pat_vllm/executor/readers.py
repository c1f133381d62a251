"""The engine's end of the rings on which workers answer: local ones, and those of other nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import Any

import zmq
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

_CANCEL_CHECK_SECONDS = 0.1
"""How long a reader of another node's replies may go on waiting after its shutdown."""


class LocalReader:
    """The engine's end of a ring from a rank on its own node."""

    def __init__(self, mq: MessageQueue) -> None:
        self._mq = mq
        self.wait_until_ready = mq.wait_until_ready
        self.dequeue = mq.dequeue
        self.shutdown = mq.shutdown

    def ready(self) -> bool:
        """Whether a message waits to be received."""
        # `MessageQueue.dequeue(timeout=0)` can lose a message that is too large for the ring: it
        # consumes the slot before the socket has delivered the bytes.
        with self._mq.buffer.get_metadata(self._mq.current_idx) as flags:
            written, read = flags[0], flags[1]
        return bool(written and not read)

    def watch(self, poller: zmq.Poller) -> None:
        """Have a poller wake up when a message arrives, or the reader is shut down."""
        # Each write to the ring is announced on a socket, on which a process can sleep.
        condition = self._mq._spin_condition
        poller.register(condition.local_notify_socket, zmq.POLLIN)
        poller.register(condition.read_cancel_socket, zmq.POLLIN)

    def woken(self, events: Mapping[zmq.Socket, int]) -> None:
        """Consume the announcement that a poller woke up for."""
        announcement = self._mq._spin_condition.local_notify_socket
        if announcement in events:
            announcement.recv(flags=zmq.NOBLOCK, copy=False)


class RemoteReader:
    """The engine's end of a ring from a rank on another node.

    vLLM's remote reader waits for its socket only, without end if the writer has died. This one can
    be shut down from another thread, like a local one.
    """

    def __init__(self, mq: MessageQueue) -> None:
        self._mq = mq
        self.wait_until_ready = mq.wait_until_ready
        self.shutdown = mq.shutdown

    def ready(self) -> bool:
        return bool(self._mq.remote_socket.poll(timeout=0))

    def watch(self, poller: zmq.Poller) -> None:
        poller.register(self._mq.remote_socket, zmq.POLLIN)

    def woken(self, events: Mapping[zmq.Socket, int]) -> None:
        return

    def dequeue(self, timeout: float | None = None) -> Any:
        """As `MessageQueue.dequeue`.

        Raises:
            TimeoutError: none came within `timeout` seconds.
            RuntimeError: the reader was shut down.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        while not self.ready():
            if self._mq.shutting_down:
                raise RuntimeError("cancelled")
            left = _CANCEL_CHECK_SECONDS
            if give_up is not None:
                left = min(left, give_up - time.monotonic())
                if left <= 0:
                    raise TimeoutError
            self._mq.remote_socket.poll(timeout=math.ceil(1e3 * left))
        return self._mq.dequeue(timeout=0)


Reader = LocalReader | RemoteReader


def reader_of(mq: MessageQueue | Reader) -> Reader:
    """A reader for a queue made by `MessageQueue.create_from_handle`, if it is none yet."""
    if isinstance(mq, Reader):
        return mq
    return LocalReader(mq) if mq._is_local_reader else RemoteReader(mq)


def wait_for_any(readers: Collection[Reader], timeout: float) -> None:
    """Sleep until one of them may have a message, one is shut down, or `timeout` seconds are over.

    vLLM's own blocking read waits for one ring, and spins on a core that the engine may share with
    a worker.
    """
    poller = zmq.Poller()
    for reader in readers:
        reader.watch(poller)
    events = dict(poller.poll(timeout=max(1, round(1e3 * timeout))))
    for reader in readers:
        reader.woken(events)

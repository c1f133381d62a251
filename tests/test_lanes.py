"""The engine's readers: alike for ranks on its own node and for those on another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from pat_vllm.executor.lanes import LocalReader, RemoteReader, reader_of

MANY_BYTES = b"x" * (2 << 20)
"""More than a slot of the ring below, so it takes vLLM's out-of-band path."""


@pytest.fixture(params=[LocalReader, RemoteReader], ids=["local", "remote"])
def ring(request: Any) -> Iterator[tuple[MessageQueue, Any]]:
    """A writer and its reader."""
    local = request.param is LocalReader
    writer = MessageQueue(1, int(local), max_chunk_bytes=1 << 20, connect_ip="127.0.0.1")
    reader = reader_of(MessageQueue.create_from_handle(writer.export_handle(), 0))
    assert isinstance(reader, request.param)
    other = threading.Thread(target=reader.wait_until_ready)
    other.start()
    writer.wait_until_ready()
    other.join()
    yield writer, reader


def sleep_on(reader: Any, seconds: float) -> bool:
    """Whether something woke the reader up."""
    poller = zmq.Poller()
    reader.watch(poller)
    events = dict(poller.poll(timeout=round(1e3 * seconds)))
    reader.woken(events)
    return bool(events)


@pytest.mark.parametrize("message", [("some", 1), MANY_BYTES], ids=["small", "large"])
def test_messages_arrive_in_order_and_wake_the_reader(ring: Any, message: Any) -> None:
    writer, reader = ring
    assert not reader.ready()
    writer.enqueue(message)
    assert sleep_on(reader, 60)
    assert reader.ready()
    writer.enqueue("second")
    assert reader.dequeue(timeout=60) == message
    assert reader.dequeue(timeout=60) == "second"
    assert not reader.ready()


def test_a_reader_gives_up_in_time(ring: Any) -> None:
    writer, reader = ring
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.05)
    writer.enqueue("late")
    assert reader.dequeue(timeout=60) == "late"


def test_shutting_down_ends_a_wait_without_end(ring: Any) -> None:
    """From another thread: the one that has seen a worker die."""
    _, reader = ring
    timer = threading.Timer(0.2, reader.shutdown)
    timer.start()
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue()
    timer.join()

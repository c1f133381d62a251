"""What the processes of an engine leave behind if they are killed, and how it is removed.

A process that ends in order removes what it has made. One that is killed does not, and what it left
would stay until the front end ends (shared memory that Python keeps track of), or for ever (sockets
and files). The engine core outlives its workers, so it removes what they have left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from urllib.parse import urlsplit

from vllm.distributed.device_communicators.shm_broadcast import Handle

_SHARED_MEMORY = Path("/dev/shm")


class Leftovers:
    """Names of what an engine's workers have made. They are random, so no other engine has them."""

    def __init__(self, queues: Iterable[Handle]) -> None:
        self._queues = list(queues)
        self._rendezvous: set[Path] = set()

    def add(self, workers: Iterable[tuple[Handle, str]]) -> None:
        """Add for each worker a message queue that it has made, and where the ranks have met.

        The latter is an init method of `torch.distributed`. If that is a file, vLLM's CPU build
        names shared memory after it.
        """
        for queue, method in workers:
            self._queues.append(queue)
            address = urlsplit(method)
            if address.scheme == "file":
                self._rendezvous.add(Path(address.path))

    def remove(self) -> None:
        """Remove what is still there, when the workers have ended. Idempotent."""
        for queue in self._queues:
            _remove_queue(queue)
        for path in self._rendezvous:
            for file in (path, *_SHARED_MEMORY.glob(f"{path.name}-*")):
                file.unlink(missing_ok=True)


def remove_sockets(queue: Handle) -> None:
    """Remove the socket files of a message queue, which ZeroMQ leaves when it is closed."""
    for address in (queue.local_subscribe_addr, queue.local_notify_addr):
        if address is not None:
            Path(urlsplit(address).path).unlink(missing_ok=True)


def _remove_queue(queue: Handle) -> None:
    if queue.buffer_handle is not None:
        *_, name = queue.buffer_handle
        with contextlib.suppress(FileNotFoundError):
            memory = SharedMemory(name)
            memory.close()
            memory.unlink()  # and have Python's resource tracker forget it
    remove_sockets(queue)

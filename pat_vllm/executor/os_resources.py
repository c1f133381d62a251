"""What the processes of an engine leave behind if they are killed, and how it is removed.

A process that ends in order removes what it has made. One that is killed does not, and what it left
would stay until the front end ends (shared memory that Python keeps track of), or for ever (sockets
and files). The engine core outlives its workers, so it removes what they have left.
"""

from __future__ import annotations

import contextlib
import glob
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import vllm.distributed.parallel_state as parallel_state
from vllm.distributed.device_communicators.shm_broadcast import Handle

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class OsResources:
    """What a worker has made that outlives it if it is killed.

    Attributes:
        queues: handles of message queues.
        met_at: where the ranks have met, as an init method of `torch.distributed`, such as
            "tcp://127.0.0.1:29500".
    """

    queues: tuple[Handle, ...]
    met_at: str


def os_resources_here(queue: Handle, met_at: str) -> OsResources:
    """What this worker has made: a queue, and with other ranks those of its groups."""
    groups = [group() for group in parallel_state._groups.values()]
    broadcasters = [group.mq_broadcaster for group in groups if group is not None]
    return OsResources((queue, *(mq.handle for mq in broadcasters if mq is not None)), met_at)


class OsResourceCleanup:
    """Names of what an engine's workers have made. They are random, so no other engine has them."""

    def __init__(self, queues: Iterable[Handle]) -> None:
        self._queues = list(queues)
        self._rendezvous: set[Path] = set()

    def add(self, workers: Iterable[OsResources]) -> None:
        """Add what each worker has made.

        If the ranks have met at a file, vLLM's CPU build names shared memory after it.
        """
        for resources in workers:
            self._queues += resources.queues
            # Not by `urlparse`: vLLM, too, takes a "?" or "#" for a part of the path.
            if resources.met_at.startswith("file://"):
                self._rendezvous.add(Path(resources.met_at.removeprefix("file://")))

    def remove(self) -> None:
        """Remove what is still there, when the workers have ended. Idempotent."""
        for queue in self._queues:
            _remove_queue(queue)
        for path in self._rendezvous:
            for file in (path, *_SHARED_MEMORY.glob(f"{glob.escape(path.name)}-*")):
                _remove(file, stat.S_ISREG)


def remove_sockets(queue: Handle) -> None:
    """Remove the socket files of a message queue, which ZeroMQ leaves when it is closed."""
    for address in (queue.local_subscribe_addr, queue.local_notify_addr):
        if address is not None and address.startswith("ipc://"):
            _remove(Path(address.removeprefix("ipc://")), stat.S_ISSOCK)


def _remove(path: Path, is_made: Callable[[int], bool]) -> None:
    """Remove a file, if it is of the kind that was made; else it is another's."""
    with contextlib.suppress(OSError):
        if is_made(path.lstat().st_mode):
            path.unlink()


def _remove_queue(queue: Handle) -> None:
    if queue.buffer_handle is not None:
        *_, name = queue.buffer_handle
        # Who has made it may be removing it, too: one of them finds it.
        with contextlib.suppress(FileNotFoundError):
            (_SHARED_MEMORY / name).unlink()
            # Have Python's resource tracker forget it, which complains of what it does not know.
            resource_tracker.register(f"/{name}", "shared_memory")
            resource_tracker.unregister(f"/{name}", "shared_memory")
    remove_sockets(queue)

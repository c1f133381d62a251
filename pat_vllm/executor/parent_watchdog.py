"""Ends an engine whose front end was killed, and workers whose engine core was killed."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable

from vllm.logger import init_logger

logger = init_logger(__name__)

_CHECK_SECONDS = 1.0
_ENGINE_CORE = "EngineCore"
_WORKER = "VllmWorker"
"""Beginnings of the names that vLLM gives to an engine core's process and to a worker's."""

_GRACE_SECONDS = 5.0
"""Time for an orderly end of a worker."""

_SHUTDOWN_SECONDS = 30.0
"""Time for an orderly end of an engine core."""


def end_when_orphaned(shutdown: Callable[[], None]) -> None:
    """In an engine core's own process, watch its parent: when that is gone, shut down and exit.

    When its front end is killed, vLLM's engine core waits for requests without end, and its workers
    keep their devices. A trainer that starts another engine finds the devices taken.
    """

    def end(pid: int) -> None:
        logger.error("the front end (pid %d) is gone; shutting the engine down", pid)
        threading.Timer(_SHUTDOWN_SECONDS, _exit_with_children).start()
        try:
            shutdown()
        finally:
            _exit_with_children()

    _when_parent_is_gone(_ENGINE_CORE, end)


def _exit_with_children() -> None:
    # A worker that is stopped (SIGSTOP) hears nothing else.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


def exit_when_orphaned() -> None:
    """In a worker's own process, watch its parent: some seconds after that is gone, exit.

    When the engine core is killed, a worker in the middle of a collective waits for the other ranks
    without end.
    """

    def end(pid: int) -> None:
        time.sleep(_GRACE_SECONDS)
        os._exit(1)

    _when_parent_is_gone(_WORKER, end)


def _when_parent_is_gone(process: str, end: Callable[[int], None]) -> None:
    """Call `end` with the parent's id, if this is a process whose name begins so."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(process):
        return
    pid = parent.pid
    assert pid is not None

    def watch() -> None:
        # Not `parent.is_alive()`: it looks at a pipe, which siblings that were forked after this
        # process would keep open.
        while os.getppid() == pid:
            time.sleep(_CHECK_SECONDS)
        end(pid)

    threading.Thread(target=watch, daemon=True, name="PATOrphanWatch").start()

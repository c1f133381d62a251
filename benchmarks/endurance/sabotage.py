"""How a worker is killed in the middle of something. Workers import this file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

PARTS = ("begin", "weights", "KV", "activation", "hand-over", "end")
"""Of a switch, in the order in which a worker does them."""


def process_id(worker: Any) -> int:
    """Of the worker's process."""
    return os.getpid()


def die_in_switch(worker: Any, rank: int, part: str, call: int, note: str) -> None:
    """Have a rank kill itself in its next switch.

    Args:
        part: one of `PARTS`, at the latest.
        call: of a part that is called several times (KV: once a layer), which call.
        note: file that gets the time of death, on the monotonic clock.
    """
    if worker.rank != rank:
        return
    inside = {
        "weights": (worker._weights, "arrange"),
        "KV": (worker._exchange, "run"),
        "activation": (worker, "_activate"),
        "hand-over": (worker._state_transfer, "restore"),
    }
    stock = worker.pat_switch

    def switch(command: Any) -> None:
        if part == "begin":
            die(note)
        if part in inside:
            _die_at_call(*inside[part], call, note)
        stock(command)
        die(note)

    worker.pat_switch = switch


def die_in_verification(worker: Any, rank: int, call: int, note: str) -> None:
    """Have a rank kill itself when it verifies drafts for the `call`-th time, in any layout."""
    if worker.rank == rank:
        for runtime in worker._runtimes.values():
            _die_at_call(runtime.runner.rejection_sampler, "forward", call, note)


def _die_at_call(owner: Any, name: str, call: int, note: str) -> None:
    stock = getattr(owner, name)
    calls = 0

    def count(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            die(note)
        return stock(*args, **options)

    setattr(owner, name, count)


def die(note: str) -> None:
    """Note the time, and kill this process."""
    Path(note).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)

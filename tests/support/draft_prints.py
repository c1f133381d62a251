"""Whether all ranks of each replica draft the same. Functions for workers, which import this."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_prints: dict[tuple[str, int], Any] = {}
_steps = 0
_stock: list[tuple[Any, Any]] = []
"""Drafters, and how they proposed."""


def watch_drafts(worker: Any) -> None:
    """Take a print of the drafts of each step from now on, by layout and replica."""
    for layout, runtime in worker._runtimes.items():
        drafter = getattr(runtime.runner, "drafter", None) or runtime.runner.speculator
        _watch(runtime.runner, drafter, (str(layout), layout.replica_of(worker.rank)))


def _watch(runner: Any, drafter: Any, key: tuple[str, int]) -> None:
    propose = drafter.propose
    _stock.append((drafter, propose))

    def call(*args: Any, **options: Any) -> Any:
        global _steps
        drafts = propose(*args, **options)
        batch = args[0] if hasattr(args[0], "req_ids") else runner.input_batch
        tokens = drafts if isinstance(drafts, list) else drafts.tolist()
        said = repr((list(batch.req_ids), tokens)).encode()
        _prints.setdefault(key, hashlib.sha256()).update(said)
        _steps += 1
        return drafts

    drafter.propose = call


def take_prints(worker: Any) -> tuple[dict[tuple[str, int], str], int]:
    """Undo `watch_drafts`; the prints, and the steps that drafted."""
    global _steps
    prints = {key: digest.hexdigest() for key, digest in _prints.items()}
    steps, _steps = _steps, 0
    _prints.clear()
    while _stock:
        drafter, propose = _stock.pop()
        drafter.propose = propose
    return prints, steps


@contextmanager
def alike(llm: Any) -> Iterator[None]:
    """Inside, the ranks of a replica draft the same for the same requests, step by step."""
    llm.collective_rpc(watch_drafts)
    ranks = []
    try:
        yield
    finally:
        ranks = llm.collective_rpc(take_prints)
    assert all(steps for _, steps in ranks), "nothing was drafted"
    for key in {key for prints, _ in ranks for key in prints}:
        assert len({prints[key] for prints, _ in ranks if key in prints}) == 1, key

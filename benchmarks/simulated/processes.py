"""Processes among which simulations are spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from typing import Self, TypeVar

S = TypeVar("S")
R = TypeVar("R")


class Processes:
    """Processes among which work is spread; with one, this process does it."""

    def __init__(self, count: int) -> None:
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ProcessPoolExecutor(count)) if count > 1 else None

    def map(self, work: Callable[[S], R], items: Sequence[S], chunk: int = 1) -> Iterator[R]:
        """What `work` makes of each item, in their order."""
        if self._pool is None:
            return map(work, items)
        return self._pool.map(work, items, chunksize=chunk)

    def as_done(self, work: Callable[[S], R], items: Sequence[S]) -> Iterator[tuple[S, R]]:
        """Each item and what `work` makes of it, in the order in which they are done."""
        if self._pool is None:
            yield from ((item, work(item)) for item in items)
            return
        asked = {self._pool.submit(work, item): item for item in items}
        for done in as_completed(asked):
            yield asked[done], done.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

"""A GPU's memory as far as free bytes go: allocations, and pools of CUDA graphs.

`torch.cuda.CUDAGraph` and `torch.cuda.graph` are imitated. A pool keeps its memory as long as a
graph lives in it, and is then given back when torch's cache is emptied, as torch has it. Graphs of
one pool use the same memory for what they compute with, and each has some of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

MiB = 1 << 20
SEGMENT = 2 * MiB
"""What the smallest graph takes."""


class Allocation:
    """Some bytes of the device, as long as it lives. Also a view of a KV cache, and its storage."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def untyped_storage(self) -> Allocation:
        return self

    def data_ptr(self) -> int:
        return id(self)

    def nbytes(self) -> int:
        return self.num_bytes


class _Pool:
    def __init__(self) -> None:
        self.shared = 0
        self.own = 0
        self.graphs = 0

    @property
    def taken(self) -> int:
        return self.shared + self.own


class Device:
    """Its memory.

    Attributes:
        total: bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        self.total = total
        self._allocations: weakref.WeakSet[Allocation] = weakref.WeakSet()
        self._pools: dict[tuple[int, int], _Pool] = {}
        self._handles = 0
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self._new_handle)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", self._capture)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *args: None)
        monkeypatch.setattr(torch.accelerator, "empty_cache", self._empty_cache)
        monkeypatch.setattr(
            torch.accelerator, "get_memory_info", lambda *args: (self.free, self.total)
        )
        zeros = torch.zeros

        def on_host(*size: Any, **options: Any) -> torch.Tensor:
            return zeros(*size, **options | {"device": "cpu"})

        monkeypatch.setattr(torch, "zeros", on_host)

    @property
    def free(self) -> int:
        """Bytes that nothing takes."""
        taken = sum(one.num_bytes for one in self._allocations)
        return self.total - taken - sum(pool.taken for pool in self._pools.values())

    def take(self, num_bytes: int) -> Allocation:
        """Allocate."""
        made = Allocation(num_bytes)
        self._allocations.add(made)
        return made

    def graph(self, pool: tuple[int, int], shared: int, own: int) -> Graph:
        """Capture a graph that computes with `shared` bytes and has `own` to itself."""
        graph = Graph(self)
        graph.enter(pool, shared, own)
        return graph

    @contextmanager
    def _capture(self, graph: Graph, pool: tuple[int, int]) -> Iterator[None]:
        graph.enter(pool, SEGMENT, 0)
        yield

    def _new_handle(self) -> tuple[int, int]:
        self._handles += 1
        return 0, self._handles

    def _empty_cache(self, *args: Any) -> None:
        self._pools = {handle: pool for handle, pool in self._pools.items() if pool.graphs}


class Graph:
    """A captured graph."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._in: tuple[_Pool, int] | None = None

    def enter(self, handle: tuple[int, int], shared: int, own: int) -> None:
        """Be captured in a pool, which grows to what it lacks."""
        pool = self._device._pools.setdefault(handle, _Pool())
        pool.shared = max(pool.shared, shared)
        pool.own += own
        pool.graphs += 1
        self._in = pool, own

    def reset(self) -> None:
        """Leave the pool."""
        if self._in is not None:
            pool, own = self._in
            pool.graphs -= 1
            pool.own -= own
            self._in = None

    __del__ = reset

"""CUDA graphs, imitated on CPU.

As on a GPU, what is captured are operations on addresses, and a replay runs them there. It runs
none of the Python code that queued them. A graph keeps no memory alive but what was allocated while
it was captured. Where a GPU would compute with garbage, because memory was freed or lies elsewhere
by now, the replay fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpuless.replaced import replace

Pool = tuple[int, int]

_GARBAGE = 0x7B
_aten = torch.ops.aten
_WAITING = {_aten._local_scalar_dense.default, _aten.masked_select.default, _aten.nonzero.default}
"""Operations whose result the CPU waits for; a device that captures refuses them."""


class GraphError(AssertionError):
    """What a driver or torch's allocator refuses, or what would be garbage on a GPU."""


@dataclass(frozen=True)
class Collective:
    """One that was captured: the group's name, what it does, and the shape of its input."""

    group: str
    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Captured:
    """A graph, as the driver remembers it when it may be gone; `phase` is what the test did."""

    number: int
    phase: str
    pool: Pool
    stream: Any
    graph: weakref.ref[Graph]
    collectives: list[Collective]


class Driver:
    """Takes the place of what torch does about CUDA graphs."""

    def __init__(self) -> None:
        self.phase = ""
        self.pools: list[Pool] = []
        self.captured: list[Captured] = []
        self.replayed: list[tuple[str, int]] = []
        """Phase of the test and number of the graph, for each replay."""
        self.capturing: Graph | None = None
        self.stream: Any = None
        """Of vLLM's `graph_capture`, inside."""
        self.users: dict[Pool, int] = {}
        """Graphs by pool. Of one that had some and has none, torch may have freed the memory."""

    def install(self, platform: Any) -> None:
        """Be the driver of this process. While it captures, "cuda" is another name of the CPU."""
        torch.cuda.CUDAGraph = self.make_graph  # type: ignore[assignment,misc]
        torch.cuda.graph = self.capture  # type: ignore[assignment,misc]
        torch.cuda.graph_pool_handle = self.graph_pool_handle
        torch.cuda._lazy_init = lambda: None
        handle = staticmethod(lambda: torch.cuda.graph_pool_handle())
        replace(platform, "graph_pool_handle", handle)
        replace(platform, "_global_graph_pool", None)

    def graph_pool_handle(self) -> Pool:
        """As torch's: a new pool."""
        self.pools.append((0, len(self.pools) + 1))
        return self.pools[-1]

    def make_graph(self, keep_graph: bool = False) -> Graph:
        """In place of `torch.cuda.CUDAGraph`."""
        return Graph(self)

    @contextmanager
    def capture(
        self, cuda_graph: Graph, pool: Pool | None = None, **options: Any
    ) -> Iterator[None]:
        """In place of `torch.cuda.graph`."""
        cuda_graph.capture_begin(pool, **options)
        try:
            yield
        finally:
            cuda_graph.capture_end()

    def enqueue(self, group: str, kind: str, tensor: torch.Tensor) -> None:
        """Note a collective, if a graph is being captured."""
        if self.capturing is not None:
            self.capturing.collectives.append(Collective(group, kind, tuple(tensor.shape)))


@dataclass(frozen=True)
class _Memory:
    """Memory that a graph uses and does not own."""

    storage: StorageWeakRef
    address: int
    size: int

    def find(self) -> torch.UntypedStorage:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise GraphError(f"a graph uses {self.size} bytes at {self.address:#x}: freed")
        if (storage.data_ptr(), storage.nbytes()) != (self.address, self.size):
            raise GraphError(f"a graph uses {self.size} bytes at {self.address:#x}: now elsewhere")
        return storage


@dataclass(frozen=True)
class _View:
    """A tensor: where it is in memory."""

    memory: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage, self.offset, self.size, self.stride)


class Graph(TorchDispatchMode):
    """In place of `torch.cuda.CUDAGraph`: the operations between begin and end of a capture."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.number = -1  # counts the driver's graphs from 0
        self.collectives: list[Collective] = []
        self._driver = driver
        self._pool: Pool | None = None
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._own: dict[int, torch.UntypedStorage] = {}
        self._foreign: dict[int, _Memory] = {}

    def capture_begin(self, pool: Pool | None = None, **options: Any) -> None:
        """As torch's."""
        if self._driver.capturing is not None or self._pool is not None:
            raise GraphError("a graph is captured inside another, or twice")
        pool = pool or self._driver.graph_pool_handle()
        users = self._driver.users
        if users.get(pool) == 0:
            raise GraphError(f"pool {pool} was released with its last graph")
        users[pool] = users.get(pool, 0) + 1
        self._pool = pool
        self.number = len(self._driver.captured)
        self._driver.captured.append(
            Captured(
                self.number,
                self._driver.phase,
                pool,
                self._driver.stream or options["stream"],
                weakref.ref(self),
                self.collectives,
            )
        )
        self._driver.capturing = self
        self.__enter__()

    def capture_end(self) -> None:
        """As torch's."""
        self.__exit__(None, None, None)
        self._driver.capturing = None

    def pool(self) -> Pool | None:
        """As torch's."""
        return self._pool

    def replay(self) -> None:
        """Run the operations on their memory."""
        if self._pool is None:
            raise GraphError("a graph is replayed that was not captured, or was reset")
        self._driver.replayed.append((self._driver.phase, self.number))
        memory = self._own | {key: borrowed.find() for key, borrowed in self._foreign.items()}

        def take(value: Any) -> Any:
            return value.view(memory[value.memory]) if isinstance(value, _View) else value

        with torch.inference_mode():
            for storage in self._own.values():
                # Graphs of a pool share its memory: nothing is there that was not just computed.
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_GARBAGE)
            for function, args, options, results in self._operations:
                outputs = function(*tree_map(take, args), **tree_map(take, options))
                for old, new in zip(tree_leaves(results), tree_leaves(outputs), strict=True):
                    if isinstance(old, _View) and (kept := take(old)).data_ptr() != new.data_ptr():
                        kept.copy_(new)

    def reset(self) -> None:
        """As torch's."""
        if self._pool is not None:
            self._driver.users[self._pool] -= 1
        self._pool = None
        self._operations.clear()
        self._own.clear()
        self._foreign.clear()

    def __del__(self) -> None:
        self.reset()

    # ---------------------------------------------------------------- capturing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _WAITING:
            raise GraphError(f"{func} waits for a device that captures")
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs["device"] = torch.device("cpu")
        result = func(*args, **kwargs)
        given = {_key(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if (key := _key(tensor)) not in given and key not in self._foreign:
                self._own.setdefault(key, tensor.untyped_storage())
        self._operations.append(
            (func, *(tree_map(self._hold, value) for value in (args, kwargs, result)))
        )
        return result

    def _hold(self, value: Any) -> Any:
        """A value as it is kept for replays."""
        if not isinstance(value, torch.Tensor):
            return value
        key, storage = _key(value), value.untyped_storage()
        if key not in self._own and key not in self._foreign:
            memory = _Memory(StorageWeakRef(storage), storage.data_ptr(), storage.nbytes())
            self._foreign[key] = memory
        return _View(key, value.dtype, value.shape, value.stride(), value.storage_offset())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    """Which memory a tensor is in; no other has this number while a weak reference to it is."""
    return tensor.untyped_storage()._cdata

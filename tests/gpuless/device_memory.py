"""A device's memory, imitated: vLLM measures it, and puts it to sleep, as a GPU's.

`MemorySnapshot`, `CuMemAllocator` and its pools are vLLM's. Below them, memory of this process
takes the place of a device's. What is not mapped is garbage. What is freed stays with its pool
until that is trimmed, or with torch's allocator until its cache is emptied.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from vllm import device_allocator
from vllm.device_allocator import cumem
from vllm.utils import mem_utils
from vllm.v1.worker import gpu_worker

from tests.gpuless.replaced import replace

_FACTORIES = (torch.empty, torch.ones, torch.zeros)
_GARBAGE = 0x5A
_HELD_ONCE = 2
"""References to an object in a dict, while `sys.getrefcount` is asked about it."""


def _nothing(*args: Any, **options: Any) -> Iterator[None]:
    yield


class DeviceMemory:
    """The memory of one device, with vLLM's allocator of it. A context: inside, tensors lie there.

    Tensors that name the host as a string (`device="cpu"`), as vLLM's backups do, lie elsewhere.

    Attributes:
        total: bytes that it has.
        most_used: bytes that were taken from the device at most.
        offloaded_graphs: bytes for graphs in a pool of vLLM's allocator, by the stream of capture.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int = 16 << 20) -> None:
        self.total = total
        self.most_used = 0
        self.allocator = cumem.CuMemAllocator()
        self._torch = _TorchMemory()
        self.graph_pools = GraphPools()
        self.offloaded_graphs: Counter[Any] = Counter()
        self._mode = _Allocations(self._take)
        self._segments: dict[int, bytearray] = {}
        runtime = SimpleNamespace(cudaMemcpy=ctypes.memmove)
        put = functools.partial(replace, put=monkeypatch.setattr)
        put(cumem, "cumem_available", True)
        put(cumem, "libcudart", runtime)
        put(cumem.CuMemAllocator, "instance", self.allocator)
        put(cumem, "create_and_map", lambda handle: self._note())
        put(cumem, "unmap_and_release", self._unmap)
        put(cumem, "use_memory_pool_with_allocator", self._pool)
        put(cumem, "current_alloc_conf", lambda: "")
        platform = SimpleNamespace(
            is_cuda_alike=lambda: True,
            is_cpu=lambda: False,
            is_rocm=lambda: False,
            is_xpu=lambda: False,
            is_integrated_gpu=lambda index: False,
            logical_device_id_to_visible_device_id=lambda device: device,
            check_if_supports_dtype=lambda dtype: None,
            dist_backend="nccl",
            device_name="imitated",
        )
        for module in (device_allocator, mem_utils, gpu_worker):
            put(module, "current_platform", platform)
        # vLLM's would walk over all objects of the tests, many times.
        no_gc = SimpleNamespace(collect=lambda: 0, unfreeze=lambda: None)
        for module in (cumem, mem_utils, gpu_worker):
            put(module, "gc", no_gc)
        answers: dict[str, Callable[..., Any]] = {
            "synchronize": lambda *args: None,
            "empty_cache": self._empty_cache,
            "get_memory_info": lambda *args: (self.total - self.taken, self.total),
            "memory_reserved": lambda *args: self._torch.reserved,
            "memory_stats": lambda *args: self._torch.stats(),
            "reset_peak_memory_stats": self._torch.reset_peak,
            "device_count": lambda: 8,
            "set_device_index": lambda device: None,
        }
        for name, value in answers.items():
            monkeypatch.setattr(torch.accelerator, name, value)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty_cache)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.graph_pools.new_handle)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: object())
        monkeypatch.setattr(torch.cuda, "graph", self._capture)
        put(gpu_worker.Worker, "synchronize_device", lambda worker: None)
        put(gpu_worker.Worker, "_scoped_allocator_max_split", contextmanager(_nothing))

    def __enter__(self) -> DeviceMemory:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def used(self, tag: str) -> int:
        """Bytes of a tag that are taken from the device."""
        every = self.allocator.pointer_to_data.values()
        return sum(data.handle[1] for data in every if data.tag == tag and not data.is_asleep)

    def referred_to(self, tag: str) -> int:
        """Bytes of a tag that a tensor lies in."""
        return sum(
            data.handle[1]
            for address, data in self.allocator.pointer_to_data.items()
            if data.tag == tag and sys.getrefcount(self._segments[address]) > _HELD_ONCE
        )

    @property
    def taken(self) -> int:
        """Bytes that are taken from the device."""
        every = self.allocator.pointer_to_data.values()
        pools = sum(data.handle[1] for data in every if not data.is_asleep)
        return pools + self._torch.reserved + sum(self.graph_pools.bytes_of.values())

    def capture(self, graph: Graph, pool: int, stream: Any, num_bytes: int) -> int:
        """Have a graph compute with so many bytes of a pool on a stream; returns by how many the
        pool grows."""
        before = self.taken
        graph.enter(self.graph_pools, pool, stream, num_bytes)
        self._note()
        return self.taken - before

    @contextmanager
    def _capture(self, graph: Graph, pool: int, stream: Any) -> Iterator[None]:
        self.capture(graph, pool, stream, 0)
        yield

    def _empty_cache(self, *args: Any) -> None:
        self._torch.empty_cache()
        self.graph_pools.trim()

    def _note(self) -> None:
        self.most_used = max(self.most_used, self.taken)

    def _take(self, address: int, memory: bytearray) -> None:
        self._torch.take(address, memory)
        self._note()

    def _unmap(self, handle: Any) -> None:
        ctypes.memset(handle[2], _GARBAGE, handle[1])

    @contextmanager
    def _pool(
        self, malloc: Callable[[Any], None], free: Callable[[int], Any]
    ) -> Iterator[tuple[Any, None]]:
        pool = _Pool(self._segments)

        def take(address: int, memory: bytearray) -> None:
            malloc((0, len(memory), address, 0))
            pool.add(address, memory)
            self._note()

        with _Allocations(take):
            yield pool, None


class GraphPools:
    """Bytes of pools of CUDA graphs, by handle and stream. Graphs of both use the same memory.

    As torch has it, a pool without graphs keeps its memory until the cache is emptied.
    """

    def __init__(self) -> None:
        self.bytes_of: dict[tuple[int, Any], int] = {}
        self.graphs: Counter[int] = Counter()
        self.new_handle = itertools.count().__next__

    def trim(self) -> None:
        self.bytes_of = {key: size for key, size in self.bytes_of.items() if self.graphs[key[0]]}


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    _pools: GraphPools | None = None

    def enter(self, pools: GraphPools, handle: int, stream: Any, num_bytes: int) -> None:
        used = (handle, stream)
        pools.bytes_of[used] = max(pools.bytes_of.get(used, 0), num_bytes)
        pools.graphs[handle] += 1
        self._pools, self._handle = pools, handle

    def reset(self) -> None:
        if self._pools is not None:
            self._pools.graphs[self._handle] -= 1
            self._pools = None

    __del__ = reset


class _TorchMemory:
    """Of torch's own allocator: it keeps what is freed, and fills it again without a gap."""

    def __init__(self) -> None:
        self.reserved = 0
        self._peak = 0
        self._live: dict[int, bytearray] = {}

    def take(self, address: int, memory: bytearray) -> None:
        self._live[address] = memory
        allocated = self._allocated()
        self._peak = max(self._peak, allocated)
        self.reserved = max(self.reserved, allocated)

    def empty_cache(self) -> None:
        self.reserved = self._allocated()

    def reset_peak(self, *args: Any) -> None:
        self._peak = self._allocated()

    def stats(self) -> dict[str, int]:
        return {
            "allocated_bytes.all.peak": self._peak,
            "allocated_bytes.all.current": self._allocated(),
        }

    def _allocated(self) -> int:
        for address in list(self._live):
            if sys.getrefcount(self._live[address]) == _HELD_ONCE:
                del self._live[address]
        return sum(map(len, self._live.values()))


class _Pool:
    def __init__(self, segments: dict[int, bytearray]) -> None:
        self._segments = segments
        self.addresses: list[int] = []

    def add(self, address: int, memory: bytearray) -> None:
        self._segments[address] = memory
        self.addresses.append(address)

    def snapshot(self) -> list[dict[str, int]]:
        return [
            {
                "address": address,
                # A tensor would refer to it, too.
                "allocated_size": sys.getrefcount(self._segments[address]) - _HELD_ONCE,
            }
            for address in self.addresses
        ]


class _Allocations(TorchFunctionMode):
    """Has new tensors lie in memory that is told to `take`, by its address."""

    def __init__(self, take: Callable[[int, bytearray], None]) -> None:
        super().__init__()
        self._take = take

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _FACTORIES or kwargs.get("device") == "cpu":
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        size = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        if not (num_bytes := math.prod(size) * dtype.itemsize):
            return func(*args, dtype=dtype)
        memory = bytearray(num_bytes)
        tensor = torch.frombuffer(memory, dtype=dtype).view(*size)
        self._take(tensor.data_ptr(), memory)
        return tensor.fill_(1) if func is torch.ones else tensor

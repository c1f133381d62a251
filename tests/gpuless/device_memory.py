"""A device's memory, imitated: vLLM's allocator for sleep mode works on it as on a GPU's.

`CuMemAllocator` and its pools are vLLM's. Below them, memory of this process takes the place of a
device's. What is not mapped is garbage. What is freed stays with its pool until that is trimmed.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from vllm.device_allocator import cumem
from vllm.v1.worker import gpu_worker

_FACTORIES = (torch.empty, torch.zeros)
_GARBAGE = 0x5A


def _nothing(*args: Any, **options: Any) -> Iterator[None]:
    yield


class DeviceMemory:
    """The memory of one device, with vLLM's allocator of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocator = cumem.CuMemAllocator()
        self._segments: dict[int, bytearray] = {}
        runtime = SimpleNamespace(cudaMemcpy=ctypes.memmove)
        monkeypatch.setattr(cumem, "cumem_available", True)
        monkeypatch.setattr(cumem, "libcudart", runtime)
        monkeypatch.setattr(cumem.CuMemAllocator, "instance", self.allocator)
        monkeypatch.setattr(cumem, "create_and_map", lambda handle: None)
        monkeypatch.setattr(cumem, "unmap_and_release", self._unmap)
        monkeypatch.setattr(cumem, "use_memory_pool_with_allocator", self._pool)
        monkeypatch.setattr(cumem, "current_alloc_conf", lambda: "")
        platform = SimpleNamespace(
            is_cuda_alike=lambda: True,
            is_cpu=lambda: False,
            is_rocm=lambda: False,
            is_xpu=lambda: False,
        )
        for module in ("vllm.device_allocator", "vllm.v1.worker.gpu_worker"):
            monkeypatch.setattr(f"{module}.current_platform", platform)
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.accelerator, name, lambda *args: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 80 << 30))
        monkeypatch.setattr(gpu_worker.Worker, "synchronize_device", lambda worker: None)
        monkeypatch.setattr(
            gpu_worker.Worker, "_scoped_allocator_max_split", contextmanager(_nothing)
        )

    def used(self, tag: str) -> int:
        """Bytes of a tag that are taken from the device."""
        every = self.allocator.pointer_to_data.values()
        return sum(data.handle[1] for data in every if data.tag == tag and not data.is_asleep)

    def _unmap(self, handle: Any) -> None:
        ctypes.memset(handle[2], _GARBAGE, handle[1])

    @contextmanager
    def _pool(
        self, malloc: Callable[[Any], None], free: Callable[[int], Any]
    ) -> Iterator[tuple[Any, None]]:
        pool = _Pool(self._segments)
        with _Allocations(pool, malloc):
            yield pool, None


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
                # This dict and the call itself refer to it; a tensor would, too.
                "allocated_size": sys.getrefcount(self._segments[address]) - 2,
            }
            for address in self.addresses
        ]


class _Allocations(TorchFunctionMode):
    """Has new tensors lie in a pool."""

    def __init__(self, pool: _Pool, malloc: Callable[[Any], None]) -> None:
        super().__init__()
        self._pool = pool
        self._malloc = malloc

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _FACTORIES:
            return func(*args, **kwargs)
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        size = args[0] if len(args) == 1 and not isinstance(args[0], int) else args
        memory = bytearray(math.prod(size) * dtype.itemsize)
        tensor = torch.frombuffer(memory, dtype=dtype).view(*size)
        self._malloc((0, len(memory), tensor.data_ptr(), 0))
        self._pool.add(tensor.data_ptr(), memory)
        return tensor

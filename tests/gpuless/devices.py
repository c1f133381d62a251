"""Devices in place of CUDA's: their memory, and who accesses it; on CPU tensors.

Tensors of an imitated device say that they are on CUDA, so that code takes its way for CUDA. Each
rank is a device, and a thread where ranks meet in collectives.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from vllm.distributed.weight_transfer import packed_tensor

from pat_vllm.kv_transfer import exchange
from tests.gpuless import launches, nccl, streams
from tests.gpuless.happens_before import Actor, Memory, Part, Races
from tests.gpuless.streams import Device, Stream, Thread, current_stream, here, unseen

T = TypeVar("T")

CUDA = torch.device("cuda", 0)

_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided}
_VALUES_UNUSED = ("aten::empty_like", "aten::new_", "aten::zeros_like", "aten::ones_like")
_BLOCKING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}


class Devices:
    """Imitated devices, one for each rank, and what is known of their memory.

    Attributes:
        on_error: called when a rank has failed, so that no other waits for it.
    """

    def __init__(self, ranks: int) -> None:
        self.races = Races(_hosts)
        self.on_error: list[Callable[[], None]] = []
        self._memories: WeakValueDictionary[int, Memory] = WeakValueDictionary()
        self._every = [Device(rank) for rank in range(ranks)]
        for device in self._every:
            device.main = here.thread = Thread(device, Actor(f"rank {device.index} host"))
            device.main.current = Stream()
            device.hosts.append(device.main.host)
        here.thread = None

    @contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """Inside, this thread is a rank's, and its tensors on CUDA are that device's."""
        here.thread = self._every[rank].main
        try:
            with torch.no_grad(), _OnCuda(self), _Accesses(self):
                yield
        finally:
            here.thread = None

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call it for each rank, each in a thread of its own."""

        def as_rank(rank: int) -> T:
            try:
                with self.on(rank):
                    return function(rank)
            except BaseException:
                for tell in self.on_error:
                    tell()
                raise

        ranks = range(len(self._every))
        with ThreadPoolExecutor(len(self._every)) as pool:
            futures = [pool.submit(as_rank, rank) for rank in ranks]
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def another_thread(self, rank: int) -> None:
        """From now on this thread is a second one of a rank's host."""
        device = self._every[rank]
        here.thread = Thread(device, Actor(f"rank {rank} thread"), device.streams[0])
        device.hosts.append(here.thread.host)

    # ---------------------------------------------------------------- memory

    def memory_of(self, tensor: torch.Tensor) -> Memory | None:
        """That of a tensor on a device or in pinned memory."""
        return self._memories.get(tensor.untyped_storage().data_ptr())

    def memory_at(self, address: int) -> Memory:
        """The memory that an address of a device is in."""
        (holder,) = (
            memory
            for memory in (ref() for ref in self._memories.valuerefs())
            if memory is not None and memory.address <= address < memory.address + len(memory)
        )
        return holder

    def on_device(self, tensor: torch.Tensor) -> bool:
        memory = self.memory_of(tensor)
        return memory is not None and memory.stream is not None

    def hold(self, tensor: torch.Tensor, pinned: bool = False, written: bool = True) -> Any:
        """A tensor with these values in new memory of the device, or in pinned memory.

        Args:
            written: whether the current stream, or the host, writes the values.
        """
        with unseen():
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            size = (reach + 1) * tensor.element_size() if tensor.numel() else 0
            memory = Memory(size, self.races, None if pinned else current_stream().actor)
            self._memories[memory.address] = memory
            flat = torch.frombuffer(memory, dtype=tensor.dtype)
            held = flat.as_strided(tensor.shape, tensor.stride())
            held.copy_(tensor)
        if written and pinned:
            self.by_host(held, writes=True)
        elif written:
            self.access(current_stream().work(), held, writes=True)
        return held

    def access(self, actor: Actor, tensor: torch.Tensor, writes: bool) -> None:
        """An actor's present work reads or writes a tensor. Pageable memory does not count."""
        with unseen():
            memory = self.memory_of(tensor)
            if memory is not None and tensor.numel():
                self.races.access(actor, memory, Part.of(tensor, memory), writes)

    def by_host(self, tensor: torch.Tensor, writes: bool = False) -> None:
        """This thread reads or writes a tensor itself."""
        here.thread.host.tick()
        self.access(here.thread.host, tensor, writes)

    # ---------------------------------------------------------------- operators

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, as work of the current stream if a tensor of it is on the device."""
        tensors = list(_tensors(func, args, kwargs))
        held = any(self.memory_of(tensor) for tensor, _ in tensors)
        if not held or any(tensor.is_meta for tensor, _ in tensors):
            return func(*args, **kwargs)
        on_device = [self.on_device(tensor) for tensor, _ in tensors]
        if not any(on_device):
            here.thread.host.tick()
        actor = current_stream().work() if any(on_device) else here.thread.host
        result = func(*args, **kwargs)
        if not func.is_view and not func._schema.name.startswith(_VALUES_UNUSED):
            for tensor, writes in tensors:
                self.access(actor, tensor, writes)
        if any(on_device):
            written = not func._schema.name.startswith(("aten::empty_like", "aten::new_empty"))
            result = tree_map_only(
                torch.Tensor,
                lambda output: (
                    output if self.memory_of(output) else self.hold(output, written=written)
                ),
                result,
            )
            transfer = func._schema.name == "aten::copy_" and not all(on_device)
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            to_pageable = transfer and self.memory_of(args[0]) is None
            if func._schema.name in _BLOCKING or (transfer and not non_blocking) or to_pageable:
                current_stream().synchronize()
        return result

    def transfer(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """`Tensor.to`."""
        target = kwargs.pop("device", None)
        dtypes = []
        for argument in args:
            if isinstance(argument, str | torch.device):
                target = argument
            else:
                dtypes.append(argument)
        if target == "meta":
            return tensor.to("meta")
        from_device = self.on_device(tensor)
        to_device = from_device if target is None else torch.device(target).type == "cuda"
        if from_device == to_device:
            return tensor.to(*dtypes, **kwargs)
        non_blocking, _ = kwargs.pop("non_blocking", False), kwargs.pop("copy", False)
        with unseen():
            values = tensor.to(*dtypes, **kwargs, copy=True)
        actor = current_stream().work()
        self.access(actor, tensor, writes=False)
        if to_device or non_blocking:
            result = self.hold(values, pinned=not to_device, written=False)
            self.access(actor, result, writes=True)
        else:
            result = values
        if not non_blocking:
            current_stream().synchronize()
        return result

    def values(self, tensor: torch.Tensor) -> Any:
        """`Tensor.numpy`."""
        array = tensor.numpy()
        if self.memory_of(tensor) is None:
            return array
        seen = array.view(_HostArray)
        seen.read = partial(self.by_host, tensor)
        return seen

    def to_list(self, tensor: torch.Tensor) -> Any:
        """`Tensor.tolist`."""
        if self.on_device(tensor):
            current_stream().synchronize()
        self.by_host(tensor)
        return tensor.tolist()


def _record_stream(tensor: torch.Tensor, devices: Devices, stream: Stream) -> None:
    """`Tensor.record_stream`."""
    if memory := devices.memory_of(tensor):
        memory.recorded.add(stream.actor.name)


class _HostArray(np.ndarray):
    """An array in pinned memory."""

    read: Callable[[], None] | None = None

    def __array_finalize__(self, other: Any) -> None:
        self.read = getattr(other, "read", None)

    def tolist(self) -> Any:
        if self.read:
            self.read()
        return super().tolist()


def _hosts() -> Sequence[Actor]:
    thread = getattr(here, "thread", None)
    return thread.device.hosts if thread else ()


def _tensors(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Each tensor among an operator's arguments, and whether it is written."""
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for element in value if isinstance(value, list | tuple) else [value]:
            if isinstance(element, torch.Tensor):
                yield element, writes


class _OnCuda(TorchFunctionMode):
    """Makes tensors in devices' memory, and has them say where they are."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._devices = devices
        get = torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__, torch.Tensor.device.__get__
        is_cuda, is_cpu, device = get
        self._instead = {
            is_cuda: devices.on_device,
            is_cpu: lambda tensor: not devices.on_device(tensor),
            device: lambda tensor: CUDA if devices.on_device(tensor) else torch.device("cpu"),
            torch.Tensor.to: devices.transfer,
            torch.Tensor.cpu: lambda tensor: devices.transfer(tensor, "cpu"),
            torch.Tensor.pin_memory: lambda tensor: devices.hold(tensor, pinned=True),
            torch.Tensor.numpy: devices.values,
            torch.Tensor.tolist: devices.to_list,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(here, "unseen", False):
            return func(*args, **kwargs)
        if func in self._instead:
            return self._instead[func](*args, **kwargs)
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        below = _get_current_function_mode()
        if device is None and isinstance(below, DeviceContext) and func in _device_constructors():
            device = below.device
        if pinned or (device is not None and torch.device(device).type == "cuda"):
            tensor = func(*args, **kwargs | {"device": "cpu"})
            return self._devices.hold(tensor, pinned=pinned, written=func not in _EMPTY)
        return func(*args, **kwargs)


class _Accesses(TorchDispatchMode):
    """Sees what operators read and write."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(here, "unseen", False):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            # Operators that are made of others arrive whole there.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._devices.operate(func, args, kwargs)


@contextmanager
def imitated(ranks: int) -> Iterator[Devices]:
    """Devices in place of CUDA's. At the end there must have been no race."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", streams.Event)
        patch.setattr(torch.cuda, "current_stream", current_stream)
        patch.setattr(torch.cuda, "set_stream", streams.set_stream)
        patch.setattr(torch.cuda, "stream", streams.on_stream)
        patch.setattr(torch, "Event", streams.Event)
        patch.setattr(torch.accelerator, "current_stream", current_stream)
        patch.setattr(torch.accelerator, "synchronize", streams.synchronize)
        patch.setattr(torch.accelerator, "current_device_index", lambda: here.thread.device.index)
        devices = Devices(ranks)
        patch.setattr(torch.Tensor, "record_stream", partialmethod(_record_stream, devices))
        patch.setattr(exchange, "dist", nccl.distributed(devices))
        patch.setitem(sys.modules, "pat_vllm.kernels.device", launches.kernels(devices))
        # vLLM keeps streams from one update of weights to the next.
        packed_tensor._get_streams.cache_clear()
        try:
            yield devices
        except Exception as error:
            if devices.races.found:
                raise AssertionError("\n".join(devices.races.found)) from error
            raise
        finally:
            packed_tensor._get_streams.cache_clear()
        assert not devices.races.found, "\n".join(devices.races.found)

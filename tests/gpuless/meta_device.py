"""A GPU whose memory has sizes and addresses, and no contents.

What is made for CUDA lies on torch's meta device, says that it is on CUDA, and is counted. What a
host reads of it is zeros. Operators of torch compute shapes; those that vLLM wrote in Python run.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda:0")
META = torch.device("meta")
_ALIGNED = 512
"""Bytes, as torch's allocator hands out."""

launched: Counter[str] = Counter()
"""Kernels, and how often each was launched."""
_written_in_python: dict[str, Callable[..., Any]] = {}


def note_python_operators() -> None:
    """Keep the functions that are registered as operators. To be called before vLLM is imported.

    They are registered for the platform that vLLM finds then, which is CPU.
    """
    impl = torch.library.Library.impl

    def noted(self: Any, op_name: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(op_name, str):
            _written_in_python[f"{self.ns}::{op_name}"] = fn
        return impl(self, op_name, fn, *args, **kwargs)

    torch.library.Library.impl = noted  # type: ignore[method-assign]


class MetaDevice(TorchDispatchMode):
    """See the module. A context, within `OnCuda`.

    Attributes:
        total: bytes of memory.
        used: bytes of the storages that are alive.
        peak: the most of them since `reset_peak`.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        self.used = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._addresses: dict[int, int] = {}
        self._next_address = 1 << 40

    def reset_peak(self, *args: Any) -> None:
        self.peak = self.used

    def free_and_total(self, *args: Any) -> tuple[int, int]:
        """Bytes, as a driver says."""
        return self.total - self.used, self.total

    def view_of_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the device sees of pinned memory of the host, which takes none of its own."""
        peak = self.peak
        view = torch.empty_like(tensor, device=META)
        key = view.untyped_storage()._cdata
        self.used -= self._sizes[key]
        self._sizes[key], self.peak = 0, peak
        return view

    def address_of(self, tensor: torch.Tensor) -> int:
        start = self._addresses.get(tensor.untyped_storage()._cdata, 0)
        return start + tensor.storage_offset() * tensor.element_size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: on_meta(value) for name, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        name = func.overloadpacket.__name__
        if name == "is_pinned":
            return True
        if name in ("pin_memory", "_pin_memory"):
            return args[0]
        if args and is_counted(args[0]) and (read := _read(name, args, kwargs)) is not None:
            return read
        if name == "copy_" and is_counted(args[1]) and not is_counted(args[0]):
            return args[0].zero_()
        if func.namespace == "vllm":
            # Modes are left while they handle an operator.
            with self, OnCuda(self), torch._C._EnableTorchFunction():  # type: ignore[attr-defined]
                return _written_in_python[func.name()](*args, **kwargs)
        if func.namespace.startswith("_") and not func._schema.returns:
            launched[func.name()] += 1
            return None
        result = func(*map(on_meta, args), **kwargs)
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if is_counted(output):
                self._count(output.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        self._sizes[key], self._addresses[key] = size, self._next_address
        self._next_address += size
        self.used += size
        self.peak = max(self.peak, self.used)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.used -= self._sizes.pop(key)
        del self._addresses[key]


class OnCuda(TorchFunctionMode):
    """Has tensors of a device say that they are on CUDA, and takes CUDA's name for it."""

    def __init__(self, memory: MetaDevice) -> None:
        super().__init__()
        self._instead: dict[Any, Callable[[torch.Tensor], Any]] = {
            torch.Tensor.data_ptr: memory.address_of,
            torch.Tensor.device.__get__: lambda tensor: CUDA,  # type: ignore[attr-defined]
            torch.Tensor.is_cuda.__get__: lambda tensor: True,  # type: ignore[attr-defined]
            torch.Tensor.is_meta.__get__: lambda tensor: False,  # type: ignore[attr-defined]
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = on_meta(kwargs["device"])
        if func in self._instead and is_counted(args[0]):
            return self._instead[func](args[0])
        return func(*args, **kwargs)


def on_meta(value: Any) -> Any:
    """The meta device in place of a CUDA device; anything else as it is."""
    if isinstance(value, str) and value.startswith("cuda"):
        return META
    return META if isinstance(value, torch.device) and value.type == "cuda" else value


def is_counted(value: Any) -> bool:
    """Whether it is a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.untyped_storage().device == META


def _read(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a host gets that reads a tensor of the device: zeros; None: it reads nothing."""
    tensor, *rest = args
    if name == "_local_scalar_dense":
        return torch.zeros((), dtype=tensor.dtype).item()
    if name == "nonzero":
        return torch.empty(0, tensor.dim(), dtype=torch.int64, device=META)
    if name in ("_to_copy", "to", "cpu"):
        given = [*rest, *kwargs.values()]
        to_host = [
            argument
            for argument in given
            if isinstance(argument, torch.device) and argument.type == "cpu"
        ]
        if name == "cpu" or to_host:
            dtype = next(
                (argument for argument in given if isinstance(argument, torch.dtype)), tensor.dtype
            )
            return torch.zeros(tensor.shape, dtype=dtype)
    return None

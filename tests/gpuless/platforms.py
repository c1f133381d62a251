"""vLLM as it decides on a GPU's platform, on a machine that has none.

vLLM's own platform classes, with capabilities in place of a driver's answers. What only kernels
need is a stub. A process that has become such a platform stays one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.gpuless.replaced import replace


@dataclass(frozen=True)
class GPU:
    """A kind of GPU: its compute capability, and AMD's name for it if it is one of theirs."""

    capability: tuple[int, int]
    arch: str = ""


PLATFORMS = {
    "sm80": GPU((8, 0)),
    "sm90": GPU((9, 0)),
    "sm100": GPU((10, 0)),
    "rocm": GPU((9, 4), "gfx942"),
}
DEFAULTS_ONLY = {
    "sm89": GPU((8, 9)),
    "sm103": GPU((10, 3)),
    "sm120": GPU((12, 0)),
    "gfx950": GPU((9, 5), "gfx950"),
    "gfx1201": GPU((12, 0), "gfx1201"),
}
"""Platforms of which only the start with vLLM's defaults is looked at."""

_STUBS: tuple[str, ...] = (
    "flashinfer",
    "flashinfer_cubin",
    "flashinfer_jit_cache",
    # Where it is not what the CPU has loaded: without AVX-512 that has another file, of the same
    # operators, which can be registered only once.
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._rocm_C",
    "vllm.vllm_flash_attn",
)


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of kernels, which have whatever one asks them for."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == stub or fullname.startswith(f"{stub}.") for stub in _STUBS):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=f"{self.__name__}.{name}")


def _stub_operators() -> None:
    """Have the operators of vLLM's CUDA extensions where vLLM's compiler passes only name them."""
    known = torch._ops._OpNamespace.__getattr__

    def lookup(self: Any, name: str) -> Any:
        try:
            return known(self, name)
        except AttributeError:
            asked_by = sys._getframe(1).f_globals.get("__name__", "")
            if not asked_by.startswith("vllm.compilation.") or name.startswith("__"):
                raise
            return mock.MagicMock(name=f"torch.ops.{self.name}.{name}")

    torch._ops._OpNamespace.__getattr__ = lookup  # type: ignore[method-assign]


def become(name: str, gpus: int = 8) -> None:
    """Make this process's vLLM one of a machine with `gpus` GPUs of a platform."""
    sys.meta_path.insert(0, _StubFinder())
    _stub_operators()
    import vllm.utils.flashinfer as flashinfer
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    gpu = (PLATFORMS | DEFAULTS_ONLY)[name]
    if gpu.arch:
        arch = SimpleNamespace(gcnArchName=gpu.arch)
        with mock.patch.object(torch.cuda, "get_device_properties", lambda device: arch):
            from vllm.platforms.rocm import RocmPlatform as Stock
    else:
        from vllm.platforms.cuda import CudaPlatformBase as Stock  # type: ignore[assignment]

    class Platform(Stock):  # type: ignore[valid-type,misc]
        """Answers for a driver."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*gpu.capability)

        @classmethod
        def device_count(cls) -> int:
            return gpus

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return name

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return f"{name}-{device_id}"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def is_fully_connected(cls, physical_device_ids: Sequence[int]) -> bool:
            return True

        @classmethod
        def log_warnings(cls) -> None:
            pass

    # All of vLLM's modules hold this one object.
    replace(current_platform, "__class__", Platform)
    # Answers from before.
    for answer in vars(flashinfer).values():
        if callable(getattr(type(answer), "cache_clear", None)):
            answer.cache_clear()
    # This one chooses kernels by the platform when it is imported.
    sys.modules.pop("vllm.v1.attention.backends.fa_utils", None)
    import vllm.model_executor.models.registry as registry

    # vLLM looks at each new model class in a process of its own, which takes long.
    replace(registry, "_run_in_subprocess", lambda fn: fn())
    assert current_platform.is_rocm() == bool(gpu.arch)

"""Lets verl's FSDP trainer and its vLLM rollout run on CPU. Test support only.

verl loads it, where `VERL_USE_EXTERNAL_MODULES` names it, in each of its processes. What it needs
of the environment besides is in `tests/verl/environment.py`.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray._private.services
import torch
import verl.utils.distributed as distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

sys.path.append(str(Path(__file__).parents[1]))
import patient_ray

MEMORY = 16 << 30
"""Bytes that a rank believes to have."""
FORGOTTEN = 100.0
"""What a KV cache is full of after a sleep."""


class _DeviceModule(types.ModuleType):
    """`torch.cpu` with what verl calls of `torch.cuda`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _device_module() -> types.ModuleType:
    module = _DeviceModule("verl_on_cpu_device")

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    for name in (
        "empty_cache",
        "ipc_collect",
        "manual_seed",
        "manual_seed_all",
        "reset_peak_memory_stats",
        "set_device",
        "synchronize",
    ):
        setattr(module, name, nothing)
    for name in (
        "current_device",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
    ):
        setattr(module, name, zero)
    module.device_count = lambda: 1  # type: ignore[attr-defined]
    module.get_device_name = lambda *args: "cpu"  # type: ignore[attr-defined]
    module.get_rng_state = lambda *args: torch.get_rng_state()  # type: ignore[attr-defined]
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.is_bf16_supported = lambda *args: True  # type: ignore[attr-defined]
    module.mem_get_info = lambda *args: (MEMORY, MEMORY)  # type: ignore[attr-defined]
    module.set_rng_state = (  # type: ignore[attr-defined]
        lambda state, *args: torch.set_rng_state(state)
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """A CPU that verl takes for an accelerator. Ray counts its ranks as GPUs."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights travel through shared memory

    def cudart(self) -> None:
        return None


def _one_backend_for_cpu() -> None:
    """Without it verl asks for "cpu:gloo,cpu:gloo", which torch refuses."""
    original = distributed.initialize_global_process_group_ray

    def initialize(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize


def _forget_in_sleep() -> None:
    """Have a sleeping engine lose what it would lose on a GPU; vLLM's CPU worker keeps all of it.

    Only in a worker's process, which has imported its worker class before it comes here.
    """
    module: Any = sys.modules.get("vllm.v1.worker.cpu_worker")
    if module is None:
        return

    def sleep(worker: Any, level: int = 1) -> None:
        runtimes = getattr(worker, "_runtimes", None)
        runners = [r.runner for r in runtimes.values()] if runtimes else [worker.model_runner]
        for runner in runners:
            for kv_cache in runner.kv_caches:
                kv_cache.fill_(FORGOTTEN)
            if level == 2:
                for weight in runner.model.parameters():
                    weight.data.fill_(torch.nan)

    module.CPUWorker.sleep = sleep


patient_ray.patch(ray._private.services)
_one_backend_for_cpu()
_forget_in_sleep()

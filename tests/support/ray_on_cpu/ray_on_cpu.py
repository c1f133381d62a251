"""Lets vLLM's Ray executor run on CPU, over devices that exist in Ray's books only.

Test support only. Ray is told of "GPUs" (`ray.init(num_gpus=...)`), which it hands out like real
ones; vLLM's CPU platform is told that Ray knows its devices by that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MODULE = "vllm.platforms.cpu"


def patch(cpu: Any, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Patch the module `MODULE`, by `put`."""
    put(cpu.CpuPlatform, "ray_device_key", "GPU")
    put(
        cpu.CpuPlatform,
        "device_control_id_to_physical_device_id",
        classmethod(lambda cls, device_id: int(device_id)),
    )

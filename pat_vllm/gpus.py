"""GPUs that are known by name: their memory and public figures. Pure; imports nothing of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Link = Literal["nvlink", "pcie"]
MiB = 1 << 20
GiB = 1 << 30
_NEAR = 0.03
"""By which the memory of a GPU may differ from that of its kind."""


def gib(size: int) -> str:
    """Bytes for people; what is missing counts as none."""
    return f"{max(0, size) / GiB:.1f} GiB"


@dataclass(frozen=True)
class Device:
    """What the memory of an engine depends on.

    Attributes:
        memory: bytes, as the driver tells them.
        capability: CUDA's compute capability, "9.0"; "" where there is none.
    """

    memory: int
    capability: str = ""


@dataclass(frozen=True)
class Gpu:
    """Public figures of a GPU.

    Attributes:
        bandwidth: bytes per second of its memory.
        flops: dense 16-bit tensor operations per second, without sparsity.
        link: what connects the GPUs of a node.
        link_bandwidth: bytes per second and direction.
        source: where the figures come from.
    """

    device: Device
    bandwidth: float
    flops: float
    link: Link
    link_bandwidth: float
    source: str


NODE_SIZE = 8
"""GPUs of a node; tensor parallelism does not span nodes."""

_PCIE4 = 25e9
"""PCIe 4.0 x16 has 31.5 GB/s per direction; copies between GPUs reach about 25."""

GPUS: Mapping[str, Gpu] = {
    "A40": Gpu(Device(46068 * MiB, "8.6"), 696e9, 149.7e12, "pcie", _PCIE4, "NVIDIA A40 datasheet"),
    "H100": Gpu(
        Device(81559 * MiB, "9.0"), 3.35e12, 989e12, "nvlink", 450e9, "NVIDIA H100 datasheet (SXM)"
    ),
    "H200": Gpu(
        Device(143771 * MiB, "9.0"), 4.8e12, 989e12, "nvlink", 450e9, "NVIDIA H200 datasheet (SXM)"
    ),
}


def gpu_named(name: str) -> str:
    """The key in `GPUS` of a name in any case.

    Raises:
        ValueError: it is none of them.
    """
    for known in GPUS:
        if known.lower() == name.lower():
            return known
    raise ValueError(f"gpu {name[:80]!r} is unknown; allowed are {', '.join(GPUS)}")


def known_gpu(device: Device, name: str = "") -> Gpu | None:
    """The public figures of a device, with its own memory; None: it is not known.

    Args:
        name: of the device, by its driver; "" where only its memory is known.
    """
    for known, gpu in GPUS.items():
        near = abs(device.memory / gpu.device.memory - 1) <= _NEAR
        words = name.upper().replace("-", " ").split()
        named = not words or (known in words and "PCIE" not in words)
        if near and named and device.capability == gpu.device.capability:
            return replace(gpu, device=device)
    return None

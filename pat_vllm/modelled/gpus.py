"""GPUs that are known by name: their memory and public figures. Pure; imports nothing of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Link = Literal["nvlink", "pcie"]
MiB = 1 << 20
GiB = 1 << 30
_NEAR = 0.03
"""Share of its memory by which a GPU may differ from the row of `GPUS` that it is taken for."""


def gib(size: int) -> str:
    """Bytes for people; what is missing counts as none."""
    return f"{max(0, size) / GiB:.1f} GiB"


@dataclass(frozen=True)
class Device:
    """What is known of each GPU of an engine by its driver.

    Attributes:
        memory: bytes that CUDA may use, as `cudaMemGetInfo` tells them.
        capability: CUDA's compute capability, "9.0"; "" where there is none.
        name: "NVIDIA A100-SXM4-80GB"; "" where there is none.
        link: what connects each of an engine's GPUs with each other; None: not known.
        bandwidth: bytes per second of its memory; 0: not known.
    """

    memory: int
    capability: str = ""
    name: str = ""
    link: Link | None = None
    bandwidth: float = 0.0


@dataclass(frozen=True)
class Gpu:
    """Public figures of a GPU.

    Attributes:
        bandwidth: bytes per second of its memory.
        flops: dense 16-bit tensor operations per second, without sparsity, summed in 32 bits.
        link: what connects the GPUs of a node: NVLink (on AMD's, Infinity Fabric), or PCIe.
        link_bandwidth: bytes per second and direction.
        source: where the figures come from.
    """

    device: Device
    bandwidth: float
    flops: float
    link: Link
    link_bandwidth: float
    source: str

    @property
    def fp8_flops(self) -> float:
        """Dense 8-bit operations per second of weights and activations in fp8.

        Twice those in 16 bits by the same sources, from Ada (8.9) on, MI300 (9.4) included. Older
        ones have none: vLLM's Marlin kernels read weights in 8 bits, and multiply in 16.
        """
        return self.flops * (2 if float(self.device.capability) >= _FP8_CAPABILITY else 1)


_FP8_CAPABILITY = 8.9
NODE_SIZE = 8
"""GPUs of a node; tensor parallelism does not span nodes."""

_PCIE4, _PCIE5 = 25e9, 50e9
"""Bytes per second and direction that copies between GPUs reach: about 25 of the 31.5 GB/s of PCIe
4.0 x16, and twice that with 5.0."""
_BRIDGE = 56e9
"""Bytes per second and direction of an NVLink bridge between two cards (NVIDIA's A40 datasheet)."""
_KEPT = 512 * MiB
"""Bytes that the driver keeps of the memory that NVML tells; an assumption. `nvidia-smi -q` calls
them reserved: published logs have 0.33 (RTX 4090) to 0.85 GiB (A100)."""


def _nvidia(
    name: str,
    mib: int,
    capability: str,
    terabytes: float,
    teraflops: float,
    link: Link,
    link_bandwidth: float,
    source: str,
) -> tuple[str, Gpu]:
    """A row of `GPUS`.

    Args:
        mib: memory in MiB, as NVML and `nvidia-smi` tell it.
    """
    device = Device(mib * MiB - _KEPT, capability, name, link)
    figures = terabytes * 1e12, teraflops * 1e12, link, link_bandwidth
    return name, Gpu(device, *figures, f"NVIDIA {source}")


def _amd(name: str, mib: int, terabytes: float, teraflops: float) -> tuple[str, Gpu]:
    """A row of `GPUS` for AMD: seven links of Infinity Fabric, one to each other GPU of a node."""
    device = Device(mib * MiB, "9.4", name, "nvlink")
    figures = terabytes * 1e12, teraflops * 1e12
    return name, Gpu(device, *figures, "nvlink", 7 * 64e9, f"AMD {name} datasheet")


GPUS: Mapping[str, Gpu] = dict(
    (
        _nvidia("A10", 23028, "8.6", 0.6, 125, "pcie", _PCIE4, "A10 datasheet"),
        _nvidia("A30", 24576, "8.0", 0.933, 165, "pcie", _PCIE4, "A30 datasheet"),
        _nvidia("A40", 46068, "8.6", 0.696, 149.7, "pcie", _PCIE4, "A40 datasheet"),
        _nvidia("A100", 81920, "8.0", 2.039, 312, "nvlink", 300e9, "A100 datasheet (SXM, 80 GB)"),
        _nvidia("A100 40GB", 40960, "8.0", 1.555, 312, "nvlink", 300e9, "A100 datasheet (SXM)"),
        _nvidia("A800", 81920, "8.0", 2.039, 312, "nvlink", 200e9, "A800 datasheet (SXM, 80 GB)"),
        _nvidia("H20", 97871, "9.0", 4.0, 148, "nvlink", 450e9, "H20 datasheet (SXM, 96 GB)"),
        _nvidia("H100", 81559, "9.0", 3.35, 989, "nvlink", 450e9, "H100 datasheet (SXM)"),
        _nvidia("H100 PCIe", 81559, "9.0", 2.0, 756, "pcie", _PCIE5, "H100 datasheet (PCIe)"),
        _nvidia("H100 NVL", 95830, "9.0", 3.9, 835, "pcie", _PCIE5, "H100 datasheet (NVL)"),
        _nvidia("H200", 143771, "9.0", 4.8, 989, "nvlink", 450e9, "H200 datasheet (SXM)"),
        _nvidia("H800", 81559, "9.0", 3.35, 989, "nvlink", 200e9, "H800 datasheet (SXM)"),
        _nvidia("GH200", 97871, "9.0", 4.0, 989, "nvlink", 450e9, "GH200 datasheet (96 GB)"),
        _nvidia("B200", 183359, "10.0", 8.0, 2250, "nvlink", 900e9, "HGX B200 datasheet"),
        _nvidia("GB200", 189471, "10.0", 8.0, 2500, "nvlink", 900e9, "GB200 NVL72 datasheet"),
        _nvidia("B300", 275040, "10.3", 8.0, 2250, "nvlink", 900e9, "HGX B300 datasheet"),
        _nvidia("L4", 23034, "8.9", 0.3, 121, "pcie", _PCIE4, "L4 datasheet"),
        _nvidia("L20", 46068, "8.9", 0.864, 119.5, "pcie", _PCIE4, "L20 datasheet"),
        _nvidia("L40", 46068, "8.9", 0.864, 181, "pcie", _PCIE4, "L40 datasheet"),
        _nvidia("L40S", 46068, "8.9", 0.864, 362, "pcie", _PCIE4, "L40S datasheet"),
        _nvidia("RTX A6000", 49140, "8.6", 0.768, 154.8, "pcie", _PCIE4, "RTX A6000 datasheet"),
        _nvidia("RTX 6000 Ada", 49140, "8.9", 0.96, 364, "pcie", _PCIE4, "RTX 6000 Ada datasheet"),
        _nvidia(
            "RTX PRO 6000", 97887, "12.0", 1.792, 503.8, "pcie", _PCIE5, "RTX PRO GB202 whitepaper"
        ),
        _nvidia("RTX 3090", 24576, "8.6", 0.936, 71, "pcie", _PCIE4, "GA102 whitepaper"),
        _nvidia("RTX 4090", 24564, "8.9", 1.008, 165.2, "pcie", _PCIE4, "Ada whitepaper"),
        _nvidia("RTX 5090", 32607, "12.0", 1.792, 209.5, "pcie", _PCIE5, "GB202 whitepaper"),
        _amd("MI300X", 196592, 5.3, 1307.4),
        # Its memory is the datasheet's 256 GB; what the driver says is not known.
        _amd("MI325X", 262144, 6.0, 1307.4),
    )
)
"""Memory as NVML tells it, the rest by public figures. Peaks of GeForce cards are those of sums in
32 bits. A GPU of several kinds of boards is that of a node of eight."""


def gpu_named(name: str) -> str:
    """The key in `GPUS` of a name in any case, with or without its spaces.

    Raises:
        ValueError: it is none of them.
    """
    for known in GPUS:
        if re.sub(r"\W", "", known).lower() == re.sub(r"[\W_]", "", name).lower():
            return known
    raise ValueError(f"gpu {name[:80]!r} is unknown; allowed are {', '.join(GPUS)}")


def known_gpu(device: Device) -> Gpu | None:
    """The public figures of a device, with its own memory and link; None: it is not known.

    For a device that is not in `GPUS`, the driver tells the memory's bandwidth. Its operations per
    byte are taken to be those of the known GPUs of its compute capability, at their median.
    """
    words = _words(device.name)
    alike = [gpu for gpu in GPUS.values() if gpu.device.capability == device.capability]
    named = [
        gpu
        for gpu in alike
        if abs(device.memory / gpu.device.memory - 1) <= _NEAR and _words(gpu.device.name) <= words
    ]
    if "MIG" in words or not alike:
        return None
    if named:
        gpu = max(named, key=lambda gpu: len(_words(gpu.device.name)))
    elif device.bandwidth:
        middle = sorted(alike, key=lambda gpu: gpu.flops / gpu.bandwidth)[len(alike) // 2]
        gpu = replace(
            middle,
            bandwidth=device.bandwidth,
            flops=middle.flops / middle.bandwidth * device.bandwidth,
            source=f"bandwidth by the driver, operations per byte as of {middle.device.name}",
        )
    else:
        return None
    return _linked(replace(gpu, device=device))


def link_of(device: Device) -> Link | None:
    """What connects the GPUs of an engine: as their driver says, or as such GPUs usually are."""
    gpu = known_gpu(device)
    return device.link if gpu is None else gpu.link


def _linked(gpu: Gpu) -> Gpu:
    """A GPU with the link that its driver sees, in place of its kind's usual one."""
    link = gpu.device.link
    if link is None or link == gpu.link:
        return gpu
    pcie = _PCIE5 if float(gpu.device.capability) >= 9 else _PCIE4
    return replace(gpu, link=link, link_bandwidth=_BRIDGE if link == "nvlink" else pcie)


def _words(name: str) -> frozenset[str]:
    """The words of a GPU's name in capitals, such as "RTX" and "4090"."""
    return frozenset(re.findall(r"[A-Z0-9]+", name.upper()))

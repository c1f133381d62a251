"""Public figures of GPUs, and the efficiencies that are assumed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Link = Literal["nvlink", "pcie"]


@dataclass(frozen=True)
class Gpu:
    """Public figures of a GPU.

    Attributes:
        memory: bytes.
        bandwidth: bytes per second of its memory.
        flops: dense 16-bit tensor operations per second, without sparsity.
        link: what connects the GPUs of a node.
        links: bytes per second and direction, by link.
        source: where the figures come from.
    """

    memory: float
    bandwidth: float
    flops: float
    link: Link
    links: Mapping[str, float]
    source: str


_PCIE4 = 25e9
"""PCIe 4.0 x16 has 31.5 GB/s per direction; copies between GPUs reach about 25."""

_PCIE5 = 50e9
"""PCIe 5.0 x16, likewise of 63 GB/s."""

GPUS: Mapping[str, Gpu] = {
    "A40": Gpu(48e9, 696e9, 149.7e12, "pcie", {"pcie": _PCIE4}, "NVIDIA A40 datasheet"),
    "H100": Gpu(
        80e9,
        3.35e12,
        989e12,
        "nvlink",
        {"nvlink": 450e9, "pcie": _PCIE5},
        "NVIDIA H100 datasheet (SXM)",
    ),
    "H200": Gpu(
        141e9,
        4.8e12,
        989e12,
        "nvlink",
        {"nvlink": 450e9, "pcie": _PCIE5},
        "NVIDIA H200 datasheet (SXM)",
    ),
}

MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that decode kernels reach; streaming copies reach about 0.9, the
smaller matrices of a layer somewhat less."""

COMPUTE_EFFICIENCY = 0.6
"""Share of the tensor peak that large matrix products reach at sustained clocks."""

STEP_OVERHEAD = 1e-3
"""Seconds of scheduling, sampling and output handling per step that the GPU waits for."""

KERNELS_PER_LAYER = 5
KERNEL_OVERHEAD = 4e-6
"""Per layer five kernels are too small for the roofline (two norms, rotary embedding and cache
write, activation, combining of attention splits): 3-5 microseconds each, in a CUDA graph."""

EXPERT_KERNELS = 4
"""More of such kernels in a layer with experts: the router's product, the choice of experts, the
sorting of tokens by them, the sum of what they give. By vLLM's Triton experts; an assumption as to
their times."""

ALL_REDUCE_LATENCY: Mapping[str, tuple[float, float]] = {
    "nvlink": (6e-6, 2e-6),
    "pcie": (15e-6, 25e-6),
}
"""Seconds of a small all-reduce, and more for each doubling of the ranks: 8 to 12 microseconds for
2 to 8 ranks over NVSwitch (one-shot kernels), 40 to 90 over PCIe (a ring through host memory)."""

ALL_REDUCE_EFFICIENCY: Mapping[str, float] = {"nvlink": 0.4, "pcie": 0.5}
"""Share of a link that an all-reduce of about a megabyte reaches: too small to fill NVLink, and
over PCIe neighbours share bridges."""

ALL_REDUCES_PER_LAYER = 2
"""One after attention, one after the MLP (Megatron-style tensor parallelism)."""

EXCHANGE_EFFICIENCY = 0.5
"""Share of a link that moving KV blocks reaches: pieces are small, and both ends pack them."""

ACTIVATION_BYTES = 2e9
"""Memory of a rank set aside for activations, CUDA graphs and communication buffers."""

BLOCK = 16
"""Tokens of a KV block."""


def gpu_names() -> tuple[str, ...]:
    """GPUs that can be modelled."""
    return tuple(GPUS)

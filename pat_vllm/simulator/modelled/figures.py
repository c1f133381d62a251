"""The efficiencies and overheads of steps that are assumed. Pure."""

from __future__ import annotations

from collections.abc import Mapping

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

"""The efficiencies and overheads of steps. Pure.

Those that say so are fitted to steps of Qwen3-8B on one H100 (`benchmarks/profiles/`), which a test
holds the model to; on other GPUs, and for what one GPU does not do, they are assumptions.
"""

from __future__ import annotations

from collections.abc import Mapping

MEMORY_EFFICIENCY = 0.92
"""Share of the memory bandwidth at which weights and KV are read: fitted."""

COMPUTE_EFFICIENCY = 0.79
"""Share of the tensor peak that large matrix products reach: fitted."""

OVERLAP = 2.3
"""Reading (r) and computing (c) hide each other in part: both take (r^q + c^q)^(1/q), with this q.
Without bound it would be the longer of the two, with 1 their sum. Fitted."""

STEP_OVERHEAD = 1.25e-3
"""Seconds of scheduling, sampling and output handling per step that the GPU waits for: fitted."""

SAMPLED_TOKEN = 5.3e-6
"""Seconds more for each token that is sampled, from 152 thousand: fitted, to torch's sampling."""

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

SWITCH_FIXED = 0.03
"""Seconds of a switch besides moving KV and weights; an assumption."""

EXCHANGE_EFFICIENCY = 0.5
"""Share of a link that moving KV blocks reaches: pieces are small, and both ends pack them."""

"""How much of a device's memory the KV cache may have. Pure.

A worker calls this with what vLLM measured; `rank_memory.py` with what it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pat_vllm.kv_transfer.plan import ROUNDS
from pat_vllm.layout import Layout


@dataclass(frozen=True)
class Measured:
    """What vLLM measured of one layout on a device, in bytes.

    Attributes:
        available: what vLLM would give to the KV cache, were this the only layout and without CUDA
            graphs.
        activations: what it has set aside for the largest step.
    """

    available: int
    activations: int


def kv_cache_bytes(
    layouts: Sequence[Measured], graphs: int, buffers: Sequence[int], staged: float
) -> int:
    """What is left for the KV cache beside all that an engine of these layouts needs.

    One layout runs at a time, so activations count once. A switch has no step beside it and may use
    the memory of activations; what these lack for it is kept free.

    Args:
        layouts: in the order of their measurement, all on this device, where each left something.
        graphs: bytes of the CUDA graphs of all layouts, in the pool that they share.
        buffers: bytes that each layout allocates with its KV cache, after it was measured. vLLM
            does not count its own; they lie in what `gpu_memory_utilization` leaves. So do those of
            one layout here.
        staged: share of the KV cache that a switch stages in the worst case.
    """
    last = layouts[-1]
    left = last.available + last.activations - graphs - (sum(buffers) - max(buffers))
    activations = max(one.activations for one in layouts)
    available = left - activations
    return available if available * staged <= activations else int(left / (1 + staged))


def staged_share(layouts: Sequence[Layout], num_kv_heads: int, num_layers: int) -> float:
    """Share of the KV cache that a switch between any two layouts stages in the worst case.

    That is a layer to be sent to each rank that has the same KV heads, in whole, and what one round
    sends and receives of it.
    """
    if len(layouts) == 1:
        return 0.0
    sent = max(1, max(layout.tp for layout in layouts) // num_kv_heads)
    return (sent + 2 / ROUNDS) / num_layers

"""How much of a device's memory the KV cache may have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """What vLLM measured of one layout on a device, in bytes.

    Attributes:
        available: what vLLM would give to the KV cache, were this the only layout.
        graphs: what it has set aside for the layout's CUDA graphs.
        activations: what it has set aside for the largest step.
    """

    available: int
    graphs: int
    activations: int


def kv_cache_bytes(layouts: Sequence[Measured], staged: float) -> int:
    """What is left for the KV cache beside all that an engine of these layouts needs.

    One layout runs at a time, so activations count once; CUDA graphs of all stay. A switch has no
    step beside it and may use the memory of activations; what these lack for it is kept free.

    Args:
        layouts: in the order of their measurement, all on this device, where each left something.
        staged: share of the KV cache that a switch stages in the worst case.
    """
    last = layouts[-1]
    left = last.available + last.graphs + last.activations - sum(one.graphs for one in layouts)
    activations = max(one.activations for one in layouts)
    available = left - activations
    return available if available * staged <= activations else int(left / (1 + staged))

"""How much of a device's memory the KV cache may have. Pure."""

from __future__ import annotations

from collections.abc import Collection
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


def kv_cache_bytes(layouts: Collection[Measured], num_layers: int, copies_sent: int) -> int:
    """What is left for the KV cache beside all that an engine of these layouts needs.

    One layout runs at a time, so activations count once; CUDA graphs of all stay. A switch has no
    step beside it and may use the memory of activations. In the worst case it sends a whole layer
    of the cache, and receives one; what the activations lack of that is kept free.

    Args:
        layouts: in the order of their measurement, all on this device.
        num_layers: of the KV cache.
        copies_sent: how many ranks may need the same KV of a rank.
    """
    graphs = sum(one.graphs for one in layouts)
    available = min(one.available + one.graphs for one in layouts) - graphs
    if len(layouts) == 1:
        return available
    activations = max(one.activations for one in layouts)
    staged = (1 + copies_sent) / num_layers
    if available * staged <= activations:
        return available
    return int((available + activations) / (1 + staged))

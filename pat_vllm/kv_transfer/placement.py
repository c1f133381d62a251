"""Which replica of a new layout each request goes to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pat_vllm.layout import Layout


@dataclass(frozen=True)
class RequestPlacement:
    """A live request at a switch: where it is, and how many tokens of context it has."""

    request_id: str
    replica: int
    context: int


def place_requests(
    requests: Iterable[RequestPlacement], source: Layout, target: Layout
) -> dict[str, int]:
    """Replica of `target` for each request carried from `source`.

    A request stays on its own ranks where that keeps the replicas balanced (each gets at most
    its share of requests, rounded up), for then part of its KV need not travel. Longest first,
    so that the requests with most KV get their choice.
    """
    ordered = sorted(requests, key=lambda r: (-r.context, r.request_id))
    share = -(-len(ordered) // target.replicas)
    count = [0] * target.replicas
    context = [0] * target.replicas
    placement: dict[str, int] = {}
    for request in ordered:
        near = sorted({target.replica_of(rank) for rank in source.ranks_of(request.replica)})
        open_near = [r for r in near if count[r] < share]
        candidates = open_near or [r for r in range(target.replicas) if count[r] < share]
        chosen = min(candidates, key=lambda r: (count[r], context[r], r))
        placement[request.request_id] = chosen
        count[chosen] += 1
        context[chosen] += request.context
    return placement

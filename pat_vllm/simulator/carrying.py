"""What a switch of a simulated engine carries to the replicas of another layout. Pure.

Live requests come first. The memory that they leave gets the contexts of ended turns, as from
`scheduler/switching/chains.py`: what a request continues is no context of its own any more. Which of them
will be continued is not known, so that the last turns' are carried, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pat_vllm.kv_transfer.placement import RequestPlacement, place_requests
from pat_vllm.layout import Layout
from pat_vllm.simulator.simulated_replica import SimulatedReplica
from pat_vllm.simulator.simulated_requests import SimulatedRequests


@dataclass(frozen=True)
class CarryResult:
    """What a switch has carried.

    Attributes:
        num_seqs: live requests.
        migrated, recomputed: those that took their KV along, and that found no room for it.
        tokens: whose KV live requests took along.
        cached_tokens: whose KV was moved, of contexts.
    """

    num_seqs: int
    migrated: int
    recomputed: int
    tokens: int
    cached_tokens: int


def carry(
    requests: SimulatedRequests,
    replicas: Sequence[SimulatedReplica],
    new_replicas: Sequence[SimulatedReplica],
    source: Layout,
    target: Layout,
) -> CarryResult:
    """Carry the live requests and, in traces with turns, contexts.

    Args:
        replicas: of layout `source`.
        new_replicas: of layout `target`.
    """
    computed = requests.num_computed_tokens.tolist()
    live = [
        (computed[request] == 0, request, replica.index)
        for replica in replicas
        for request in (*replica.running, *replica.waiting)
    ]
    live.sort(key=lambda entry: entry[0])  # those without KV queue behind
    held = {i: (replica, requests.num_tokens(i)) for _, i, replica in live}
    placement = _spread(held, source, target)
    room = [replica.room for replica in new_replicas]
    full: set[int] = set()
    migrated = tokens = recomputed = 0
    for waits, request, _ in live:
        replica = new_replicas[placement[request]]
        replica.waiting.append(request)
        if waits:
            continue
        if computed[request] <= room[replica.index] and replica.index not in full:
            room[replica.index] -= computed[request]
            migrated += 1
            tokens += computed[request]
        else:
            # As in vLLM, which admits in order: nobody overtakes one that has to wait for room.
            full.add(replica.index)
            requests.num_computed_tokens[request] = 0
            recomputed += 1
    cached = 0
    if requests.has_turns:
        cached = _carry_contexts(requests, replicas, new_replicas, source, target, placement, room)
    return CarryResult(len(live), migrated, recomputed, tokens, cached)


def _spread(held: Mapping[int, tuple[int, int]], source: Layout, target: Layout) -> dict[int, int]:
    """Replicas of `target`, as an engine spreads what (replica, tokens) are of `source`."""
    placed = [RequestPlacement(f"{i:09}", replica, tokens) for i, (replica, tokens) in held.items()]
    return {int(name): replica for name, replica in place_requests(placed, source, target).items()}


class _Context(NamedTuple):
    """What a request has left in a replica.

    Attributes:
        waits: a request that waits for it, the request itself or the one that continues it.
        used: when the request ended.
    """

    owner: int
    replica: int
    tokens: int
    waits: int | None
    used: float


def _carry_contexts(
    requests: SimulatedRequests,
    replicas: Sequence[SimulatedReplica],
    new_replicas: Sequence[SimulatedReplica],
    source: Layout,
    target: Layout,
    placement: Mapping[int, int],
    room: list[int],
) -> int:
    """Put contexts into the memory of new replicas that live requests leave.

    Those come first for which a request waits, then the most recently used ones.

    Args:
        placement: replica of `new_replicas` for each live request.
        room: tokens for which each new replica has memory beside its live requests; less what is
            carried, in the end.

    Returns:
        Tokens that are carried.
    """
    left: list[_Context] = []
    for replica in replicas:
        for owner in replica.free.owners:
            following = requests.next(owner)
            user = owner if owner in placement else following
            waits = user if user in placement else None
            if waits is not None and requests.num_computed_tokens[waits]:
                continue  # that one holds it, or has a context of its own
            if waits is None and following is not None and requests.num_output_tokens[following]:
                continue  # that one has ended, elsewhere
            tokens = replica.free.left_by(owner)
            left.append(_Context(owner, replica.index, tokens, waits, requests.finished[owner]))
    left.sort(key=lambda context: -context.used if context.waits is None else -math.inf)
    idle = {
        i: (context.replica, context.tokens)
        for i, context in enumerate(left)
        if context.waits is None
    }
    spread_out = _spread(idle, source, target)
    taken: list[list[tuple[int, int]]] = [[] for _ in new_replicas]
    for i, context in enumerate(left):
        at = spread_out[i] if context.waits is None else placement[context.waits]
        if (tokens := min(context.tokens, room[at])) > 0:
            room[at] -= tokens
            taken[at].append((context.owner, tokens))
    for replica, contexts in zip(new_replicas, taken, strict=True):
        for owner, tokens in reversed(contexts):
            replica.free.overwrite(tokens)
            replica.free.free(tokens, owner)
    return sum(tokens for contexts in taken for _, tokens in contexts)

"""Which KV bytes go from which rank to which at a switch. Pure: no torch, no vLLM.

KV blocks hold the same number of tokens in every layout, so block `i` of a request becomes
block `i` of the same request; only their heads are spread over other ranks, as the kind of each
group of KV caches says (`kinds.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pat_vllm.layout import Layout
from pat_vllm.models.kinds import Kinds, StateKind

ROUNDS = 32
"""Number of rounds in which a layer arrives, if much of it moves. What arrives in one round is
staged: more rounds take less memory and exchange smaller messages."""
EXCHANGE_CHANNELS = 8
"""At most so many channels of NCCL's move KV between two ranks: each takes memory of every device
for every other one, in the whole life of an engine. By default there are up to 32 over NVSwitch."""


@dataclass(frozen=True)
class RequestBlocks:
    """Where one migrating request's KV lies, and where it goes; or that of cached blocks.

    Block ids are local to the replica's pool; `source_blocks[i]` and `target_blocks[i]` hold the
    same tokens.

    Attributes:
        group: index of the KV cache group whose layers' KV it is.
    """

    request_id: str
    source_replica: int
    source_blocks: Sequence[int]
    target_replica: int
    target_blocks: Sequence[int]
    group: int = 0

    def __post_init__(self) -> None:
        if len(self.source_blocks) != len(self.target_blocks):
            raise ValueError(
                f"request {self.request_id}: {len(self.source_blocks)} source blocks cannot fill "
                f"{len(self.target_blocks)} target blocks"
            )


@dataclass(frozen=True)
class HeadRoute:
    """Heads that travel together from one rank to another.

    `source_heads` and `target_heads` index the head axis of the two ranks' own KV views, and are
    equally long.
    """

    source_rank: int
    target_rank: int
    source_heads: range
    target_heads: range


@dataclass(frozen=True)
class BlockMove:
    """Blocks whose `route` heads are copied; `source_blocks[i]` goes to `target_blocks[i]`.

    Attributes:
        group: index of the KV cache group in whose layers they are.
    """

    route: HeadRoute
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]
    group: int = 0


@lru_cache(maxsize=1024)
def head_routes(
    source: Layout, source_replica: int, target: Layout, target_replica: int, kind: StateKind
) -> tuple[HeadRoute, ...]:
    """Routes that fill every head of every rank of the target replica exactly once.

    Where several source ranks hold a head (replicated ones), the target rank itself is
    preferred, because it needs no transfer. Otherwise the holders take turns.
    """
    holders: dict[int, list[int]] = defaultdict(list)
    for rank in source.ranks_of(source_replica):
        for head in kind.heads_of(source, source.tp_rank_of(rank)):
            holders[head].append(rank)

    routes: list[HeadRoute] = []
    for rank in target.ranks_of(target_replica):
        wanted = kind.heads_of(target, target.tp_rank_of(rank))
        sources = [_pick_holder(holders[head], rank) for head in wanted]
        start = 0
        for end in range(1, len(wanted) + 1):
            if end < len(wanted) and sources[end] == sources[start]:
                continue
            source_rank = sources[start]
            held = kind.heads_of(source, source.tp_rank_of(source_rank))
            first = held.index(wanted[start])
            routes.append(
                HeadRoute(source_rank, rank, range(first, first + end - start), range(start, end))
            )
            start = end
    return tuple(routes)


def _pick_holder(holders: Sequence[int], target_rank: int) -> int:
    return target_rank if target_rank in holders else holders[target_rank % len(holders)]


def plan_moves(
    source: Layout, target: Layout, kinds: Kinds, requests: Iterable[RequestBlocks]
) -> list[BlockMove]:
    """Block moves that carry the requests' KV from layout `source` to layout `target`.

    Every (group, block, head) of every target rank is written exactly once, from a rank that holds
    it. Moves of requests that share both replicas are merged, so the plan's size depends on the
    number of ranks rather than on the number of requests.
    """
    source_blocks: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    target_blocks: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for request in requests:
        of = (request.group, request.source_replica, request.target_replica)
        source_blocks[of].extend(request.source_blocks)
        target_blocks[of].extend(request.target_blocks)

    return [
        BlockMove(route, tuple(source_blocks[of]), tuple(target_blocks[of]), group)
        for of in sorted(source_blocks)
        if source_blocks[of]
        for group, from_replica, to_replica in [of]
        for route in head_routes(source, from_replica, target, to_replica, kinds[group])
    ]


@dataclass(frozen=True)
class RankMoves:
    """One rank's part of a plan: what it sends to and receives from each rank, itself included.

    Both sides list a pair's moves in the plan's order, so that packed bytes need no headers.

    Attributes:
        most_staged: number of (block, head) pairs sent and received by the rank with most of them.
            The same on all ranks.
    """

    sends: tuple[tuple[BlockMove, ...], ...]
    receives: tuple[tuple[BlockMove, ...], ...]
    most_staged: int = 0

    @classmethod
    def of(cls, rank: int, world_size: int, moves: Sequence[BlockMove]) -> RankMoves:
        """The part of `moves` that concerns `rank`."""
        staged = [0] * world_size
        for move in moves:
            for end in (move.route.source_rank, move.route.target_rank):
                staged[end] += len(move.source_blocks) * len(move.route.source_heads)

        def between(*ends: int) -> tuple[BlockMove, ...]:
            return tuple(m for m in moves if (m.route.source_rank, m.route.target_rank) == ends)

        peers = range(world_size)
        return cls(
            sends=tuple(between(rank, peer) for peer in peers),
            receives=tuple(between(peer, rank) for peer in peers),
            most_staged=max(staged),
        )

    def split(self, rounds: int) -> list[RankMoves]:
        """The same moves in rounds of about equal size, which any rank splits alike."""
        return [
            RankMoves(
                sends=tuple(_part(moves, i, rounds) for moves in self.sends),
                receives=tuple(_part(moves, i, rounds) for moves in self.receives),
            )
            for i in range(rounds)
        ]


def _part(moves: Iterable[BlockMove], i: int, parts: int) -> tuple[BlockMove, ...]:
    """Part `i` of each move: a run of its blocks; none of a move that has too few."""
    cut = []
    for move in moves:
        total = len(move.source_blocks)
        run = slice(i * total // parts, (i + 1) * total // parts)
        if blocks := move.source_blocks[run]:
            cut.append(BlockMove(move.route, blocks, move.target_blocks[run], move.group))
    return tuple(cut)

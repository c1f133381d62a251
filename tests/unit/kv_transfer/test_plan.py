"""The block-move plan writes every (block, head) of the target once, from a rank that holds it."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.kv_transfer.plan import RankMoves, RequestBlocks, head_routes, plan_moves
from pat_vllm.layout import Layout
from pat_vllm.models.kinds import (
    ChunkedAttention,
    FullAttention,
    Kinds,
    LatentAttention,
    LinearAttention,
    SlidingWindow,
    StateKind,
)
from tests.support.kinds import LaterHalf, full

Pair = tuple[Layout, Layout, int]
Migration = tuple[Layout, Layout, Kinds, list[RequestBlocks], set[tuple[int, int, int]]]


@st.composite
def layout_pairs(draw: st.DrawFn) -> Pair:
    """Two layouts of as many ranks, and a number of KV heads that both can hold."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    divisors = [tp for tp in range(1, ranks + 1) if ranks % tp == 0]
    source, target = draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors))
    heads = [h for h in range(1, 33) if all(h % t == 0 or t % h == 0 for t in (source, target))]
    return Layout.of(source, ranks), Layout.of(target, ranks), draw(st.sampled_from(heads))


def kinds_with(heads: int) -> st.SearchStrategy[Kinds]:
    """Groups of one to four kinds, one of which PAT does not know, and one that is never cut."""
    sizes = st.integers(1, 3)
    kinds = st.one_of(
        sizes.map(lambda size: FullAttention(heads, size)),
        # Its heads are others, which all these layouts divide.
        sizes.map(lambda size: LinearAttention(48, size, slot_bytes=48)),
        st.builds(lambda size, window: SlidingWindow(heads, size, window=window), sizes, sizes),
        st.builds(lambda size, chunk: ChunkedAttention(heads, size, chunk=chunk), sizes, sizes),
        sizes.map(lambda size: LaterHalf(heads, size)),
        sizes.map(lambda size: LatentAttention(1, size)),
    )
    return st.lists(kinds, min_size=1, max_size=4)


@st.composite
def migrations(draw: st.DrawFn) -> Migration:
    """Requests whose KV moves, and the blocks of the target (group, replica, block) that hold it.

    Groups share the blocks of a replica.
    """
    source, target, heads = draw(layout_pairs())
    kinds = draw(kinds_with(heads))
    random = Random(draw(st.integers(0, 2**32)))
    source_pools, target_pools = (
        [iter(random.sample(range(1, most), most - 1)) for _ in range(layout.replicas)]
        for layout, most in ((source, 100), (target, 800))
    )
    requests = []
    wanted = set()
    for i in range(draw(st.integers(0, 6))):
        a = draw(st.integers(0, source.replicas - 1))
        b = draw(st.integers(0, target.replicas - 1))
        tokens = draw(st.integers(0, 4))
        for group, kind in enumerate(kinds):
            pools = source_pools[a], target_pools[b]
            old, new = (tuple(next(pool) for _ in kind.held(tokens)) for pool in pools)
            requests.append(RequestBlocks(f"r{i}", a, old, b, new, group))
            wanted |= {(group, b, block) for block in new}
    return source, target, kinds, requests, wanted


@given(migrations())
def test_every_target_block_and_head_is_written_once_with_its_own_bytes(case: Migration) -> None:
    """Source ranks hold tagged bytes; the plan is replayed. Null blocks are neither read nor
    written."""
    source, target, kinds, requests, wanted = case
    memory = {
        (request.group, rank, block, local): (request.request_id, i, head)
        for request in requests
        for rank in source.ranks_of(request.source_replica)
        for i, block in enumerate(request.source_blocks)
        for local, head in enumerate(kinds[request.group].heads_of(source, source.tp_rank_of(rank)))
    }
    expected = {
        (request.group, rank, block, local): (request.request_id, i, head)
        for request in requests
        for rank in target.ranks_of(request.target_replica)
        for i, block in enumerate(request.target_blocks)
        for local, head in enumerate(kinds[request.group].heads_of(target, target.tp_rank_of(rank)))
    }
    writes = [
        (
            (move.group, move.route.target_rank, b, hb),
            memory[move.group, move.route.source_rank, a, ha],
        )
        for move in plan_moves(source, target, kinds, requests)
        for a, b in zip(move.source_blocks, move.target_blocks, strict=True)
        for ha, hb in zip(move.route.source_heads, move.route.target_heads, strict=True)
    ]
    assert dict(writes) == expected
    assert len(writes) == len(expected), "nothing is written twice"
    assert {(group, target.replica_of(rank), block) for group, rank, block, _ in expected} == wanted


@settings(max_examples=50)
@given(migrations())
def test_ranks_partition_the_plan(case: Migration) -> None:
    source, target, kinds, requests, _ = case
    moves = plan_moves(source, target, kinds, requests)
    ranks = range(source.world_size)
    parts = [RankMoves.of(rank, source.world_size, moves) for rank in ranks]
    assert sum(len(sends) for part in parts for sends in part.sends) == len(moves)
    staged: Counter[int] = Counter()
    for move in moves:
        for end in (move.route.source_rank, move.route.target_rank):
            staged[end] += len(move.source_blocks) * len(move.route.source_heads)
    assert {part.most_staged for part in parts} == {max(staged.values(), default=0)}
    for a in ranks:
        for b in ranks:
            assert parts[a].sends[b] == parts[b].receives[a]
            for move in parts[a].sends[b]:
                assert (move.route.source_rank, move.route.target_rank) == (a, b)


@settings(max_examples=60)
@given(layout_pairs(), st.booleans())
def test_what_a_rank_holds_already_is_not_fetched(case: Pair, latent: bool) -> None:
    """Neither a head of its own, nor any of its own requests where the layout becomes wider; of a
    state that is whole on every rank, nothing where it becomes narrower, either."""
    source, target, num_kv_heads = case
    if latent:
        num_kv_heads = 1
    kind: StateKind = LatentAttention(1, 16) if latent else full(num_kv_heads)[0]
    if latent and source.tp % target.tp == 0:
        for b in range(target.replicas):
            a = b % source.replicas
            routes = head_routes(source, a, target, b, kind)
            assert all(route.source_rank == route.target_rank for route in routes)
    for a in range(source.replicas):
        for b in range(target.replicas):
            for route in head_routes(source, a, target, b, kind):
                rank = route.target_rank
                own = source.kv_heads_of(source.tp_rank_of(rank), num_kv_heads)
                wanted = target.kv_heads_of(target.tp_rank_of(rank), num_kv_heads)
                heads = {wanted[head] for head in route.target_heads}
                if rank in source.ranks_of(a) and heads & {*own}:
                    assert route.source_rank == rank
    for rank in range(source.world_size) if target.tp % source.tp == 0 else ():
        a, b = source.replica_of(rank), target.replica_of(rank)
        assert {target.replica_of(other) for other in source.ranks_of(a)} == {b}
        routes = head_routes(source, a, target, b, kind)
        assert [route.source_rank for route in routes if route.target_rank == rank] == [rank]


def test_holders_of_a_replicated_head_take_turns() -> None:
    """One KV head goes from a group of four, where each rank holds it, to the other group."""
    layout = Layout(4, 2)
    (kind,) = full(1)
    routes = head_routes(layout, 0, layout, 1, kind)
    assert len({route.source_rank for route in routes}) > 1


def test_unequal_blocks_are_named() -> None:
    with pytest.raises(ValueError, match=r"request a: 2 source blocks .* 1 target"):
        RequestBlocks("a", 0, (1, 2), 0, (1,))

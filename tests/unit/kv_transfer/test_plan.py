"""The block-move plan writes every (block, head) of the target once, from a rank that holds it."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.kv_transfer.plan import RankMoves, RequestBlocks, head_routes, plan_moves
from pat_vllm.layout import Layout

Pair = tuple[Layout, Layout, int]
Migration = tuple[Layout, Layout, int, list[RequestBlocks]]


@st.composite
def layout_pairs(draw: st.DrawFn) -> Pair:
    """Two layouts of as many ranks, and a number of KV heads that both can hold."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    divisors = [tp for tp in range(1, ranks + 1) if ranks % tp == 0]
    source, target = draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors))
    heads = [h for h in range(1, 33) if all(h % t == 0 or t % h == 0 for t in (source, target))]
    return Layout.of(source, ranks), Layout.of(target, ranks), draw(st.sampled_from(heads))


@st.composite
def migrations(draw: st.DrawFn) -> Migration:
    source, target, heads = draw(layout_pairs())
    random = Random(draw(st.integers(0, 2**32)))
    source_pools, target_pools = (
        [iter(random.sample(range(most), most)) for _ in range(layout.replicas)]
        for layout, most in ((source, 25), (target, 200))
    )
    requests = []
    for i in range(draw(st.integers(0, 6))):
        a = draw(st.integers(0, source.replicas - 1))
        b = draw(st.integers(0, target.replicas - 1))
        n = draw(st.integers(0, 4))
        pools = ((source_pools[a], n), (target_pools[b], n))
        blocks = [tuple(next(pool) for _ in range(count)) for pool, count in pools]
        requests.append(RequestBlocks(f"r{i}", a, blocks[0], b, blocks[1]))
    return source, target, heads, requests


@given(migrations())
def test_every_target_block_and_head_is_written_once_with_its_own_bytes(case: Migration) -> None:
    """Source ranks hold tagged bytes; the plan is replayed."""
    source, target, num_kv_heads, requests = case
    memory = {
        (rank, block, local): (request.request_id, i, head)
        for request in requests
        for rank in source.ranks_of(request.source_replica)
        for i, block in enumerate(request.source_blocks)
        for local, head in enumerate(source.kv_heads_of(source.tp_rank_of(rank), num_kv_heads))
    }
    expected = {
        (rank, block, local): (request.request_id, i, head)
        for request in requests
        for rank in target.ranks_of(request.target_replica)
        for i, block in enumerate(request.target_blocks)
        for local, head in enumerate(target.kv_heads_of(target.tp_rank_of(rank), num_kv_heads))
    }
    writes = [
        ((move.route.target_rank, b, hb), memory[move.route.source_rank, a, ha])
        for move in plan_moves(source, target, num_kv_heads, requests)
        for a, b in zip(move.source_blocks, move.target_blocks, strict=True)
        for ha, hb in zip(move.route.source_heads, move.route.target_heads, strict=True)
    ]
    assert dict(writes) == expected
    assert len(writes) == len(expected), "nothing is written twice"


@settings(max_examples=50)
@given(migrations())
def test_ranks_partition_the_plan(case: Migration) -> None:
    source, target, num_kv_heads, requests = case
    moves = plan_moves(source, target, num_kv_heads, requests)
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
@given(layout_pairs())
def test_what_a_rank_holds_already_is_not_fetched(case: Pair) -> None:
    """Neither a head of its own, nor any of its own requests where the layout becomes wider."""
    source, target, num_kv_heads = case
    for a in range(source.replicas):
        for b in range(target.replicas):
            for route in head_routes(source, a, target, b, num_kv_heads):
                rank = route.target_rank
                own = source.kv_heads_of(source.tp_rank_of(rank), num_kv_heads)
                wanted = target.kv_heads_of(target.tp_rank_of(rank), num_kv_heads)
                heads = {wanted[head] for head in route.target_heads}
                if rank in source.ranks_of(a) and heads & {*own}:
                    assert route.source_rank == rank
    for rank in range(source.world_size) if target.tp % source.tp == 0 else ():
        a, b = source.replica_of(rank), target.replica_of(rank)
        assert {target.replica_of(other) for other in source.ranks_of(a)} == {b}
        routes = head_routes(source, a, target, b, num_kv_heads)
        assert [route.source_rank for route in routes if route.target_rank == rank] == [rank]


def test_holders_of_a_replicated_head_take_turns() -> None:
    """One KV head goes from a group of four, where each rank holds it, to the other group."""
    layout = Layout(4, 2)
    routes = head_routes(layout, 0, layout, 1, num_kv_heads=1)
    assert len({route.source_rank for route in routes}) > 1


def test_unequal_blocks_are_named() -> None:
    with pytest.raises(ValueError, match=r"request a: 2 source blocks .* 1 target"):
        RequestBlocks("a", 0, (1, 2), 0, (1,))

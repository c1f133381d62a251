"""The block-move plan writes every (block, head) of the target once, from a rank that holds it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.kv_transfer.plan import RankMoves, RequestBlocks, head_routes, plan_moves
from pat_vllm.layout import Layout, device_of


@st.composite
def layout_pairs(draw):
    world_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    divisors = [t for t in range(1, world_size + 1) if world_size % t == 0]
    source, target = draw(st.sampled_from(divisors)), draw(st.sampled_from(divisors))
    heads = [h for h in range(1, 33) if all(h % t == 0 or t % h == 0 for t in (source, target))]
    return (
        Layout.of(source, world_size),
        Layout.of(target, world_size),
        draw(st.sampled_from(heads)),
    )


@st.composite
def migrations(draw):
    source, target, num_kv_heads = draw(layout_pairs())
    source_pools = [iter(draw(st.permutations(range(1, 25)))) for _ in range(source.replicas)]
    target_pools = [iter(draw(st.permutations(range(1, 200)))) for _ in range(target.replicas)]
    requests = []
    for i in range(draw(st.integers(0, 6))):
        a = draw(st.integers(0, source.replicas - 1))
        b = draw(st.integers(0, target.replicas - 1))
        n = draw(st.integers(0, 4))
        requests.append(
            RequestBlocks(
                f"r{i}",
                a,
                tuple(next(source_pools[a]) for _ in range(n)),
                b,
                tuple(next(target_pools[b]) for _ in range(n)),
            )
        )
    return source, target, num_kv_heads, requests


@given(migrations())
def test_every_target_block_and_head_is_written_once_with_its_own_bytes(case):
    source, target, num_kv_heads, requests = case
    # Fill the source ranks with tagged bytes, replay the plan, compare with what must be there.
    memory = {}
    for request in requests:
        for rank in source.ranks_of(request.source_replica):
            held = source.kv_heads_of(source.tp_rank_of(rank), num_kv_heads)
            for i, block in enumerate(request.source_blocks):
                for local, head in enumerate(held):
                    memory[rank, block, local] = (request.request_id, i, head)
    written = {}
    writes: Counter[tuple[int, int, int]] = Counter()
    for move in plan_moves(source, target, num_kv_heads, requests):
        route = move.route
        assert len(route.source_heads) == len(route.target_heads)
        for a, b in zip(move.source_blocks, move.target_blocks, strict=True):
            for ha, hb in zip(route.source_heads, route.target_heads, strict=True):
                key = (route.target_rank, b, hb)
                writes[key] += 1
                written[key] = memory[route.source_rank, a, ha]
    expected = {
        (rank, block, local): (request.request_id, i, head)
        for request in requests
        for rank in target.ranks_of(request.target_replica)
        for i, block in enumerate(request.target_blocks)
        for local, head in enumerate(target.kv_heads_of(target.tp_rank_of(rank), num_kv_heads))
    }
    assert written == expected
    assert all(count == 1 for count in writes.values())


@given(layout_pairs())
def test_a_rank_that_holds_a_head_already_does_not_fetch_it(case):
    source, target, num_kv_heads = case
    for a in range(source.replicas):
        for b in range(target.replicas):
            for route in head_routes(source, a, target, b, num_kv_heads):
                if route.target_rank not in source.ranks_of(a):
                    continue
                own = source.kv_heads_of(source.tp_rank_of(route.target_rank), num_kv_heads)
                wanted = target.kv_heads_of(target.tp_rank_of(route.target_rank), num_kv_heads)
                heads = {wanted[h] for h in route.target_heads}
                if heads & set(own):
                    assert route.source_rank == route.target_rank


@given(migrations())
def test_rank_moves_partition_the_plan(case):
    source, target, num_kv_heads, requests = case
    moves = plan_moves(source, target, num_kv_heads, requests)
    world_size = source.world_size
    parts = [RankMoves.of(rank, world_size, moves) for rank in range(world_size)]
    assert sum(len(m) for p in parts for m in p.sends) == len(moves)
    for a in range(world_size):
        for b in range(world_size):
            assert parts[a].sends[b] == parts[b].receives[a]


@given(layout_pairs())
def test_own_requests_stay_where_they_are_in_a_wider_layout(case):
    source, target, num_kv_heads = case
    if target.tp % source.tp:
        return
    for rank in range(source.world_size):
        a, b = source.replica_of(rank), target.replica_of(rank)
        assert {target.replica_of(other) for other in source.ranks_of(a)} == {b}
        routes = head_routes(source, a, target, b, num_kv_heads)
        assert [r.source_rank for r in routes if r.target_rank == rank] == [rank]


@given(layout_pairs())
def test_devices_of_a_group_are_neighbours(case):
    source, target, _ = case
    world_size = source.world_size
    assert sorted(device_of(rank, world_size) for rank in range(world_size)) == [*range(world_size)]
    assert device_of(0, world_size) == 0
    for layout in (source, target):
        if layout.tp & (layout.tp - 1):
            continue  # a factor of 3 in it: not of every layout
        for replica in range(layout.replicas):
            devices = sorted(device_of(rank, world_size) for rank in layout.ranks_of(replica))
            assert devices == [*range(devices[0], devices[0] + layout.tp)]


@given(layout_pairs())
def test_kv_heads_cover_the_model(case):
    layout, _, num_kv_heads = case
    held = Counter(head for t in range(layout.tp) for head in layout.kv_heads_of(t, num_kv_heads))
    assert set(held) == set(range(num_kv_heads))
    assert len(set(held.values())) == 1


def test_layout_errors_name_the_values():
    with pytest.raises(ValueError, match="tp=3 does not divide the 4 ranks"):
        Layout.of(3, 4)
    with pytest.raises(ValueError, match="3 KV heads cannot be split over tp=2"):
        Layout.of(2, 4).kv_heads_per_rank(3)
    with pytest.raises(ValueError, match="3 KV heads cannot be replicated over tp=4"):
        Layout.of(4, 4).kv_heads_per_rank(3)
    with pytest.raises(ValueError, match="2 source blocks cannot fill 1 target"):
        RequestBlocks("a", 0, (1, 2), 0, (1,))


def test_layout_reads_as_tp_by_replicas():
    assert [str(Layout.of(t, 4)) for t in (1, 2, 4)] == ["tp1dp4", "tp2dp2", "tp4dp1"]

"""Rows that trade places: every layout finds its shard, and the way back restores every row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.weights.row_order import (
    Block,
    RowOrder,
    Swap,
    block_of,
    common_unit,
    rounds,
    rows_moved,
)
from pat_vllm.weights.shards import (
    EvenPartition,
    Partition,
    QKVPartition,
    VocabPartition,
    pieces_of,
)

TPS = (1, 2, 4, 8)


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    kind = draw(st.sampled_from(["merged", "column", "qkv", "vocab"]))
    if kind == "vocab":
        return VocabPartition(draw(st.integers(1, 200)), draw(st.sampled_from([8, 16, 64])))
    if kind == "qkv":
        kv_heads = draw(st.sampled_from([1, 2, 4, 8, 16]))
        heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
        heads = max(heads, TPS[-1])
        return QKVPartition(heads, kv_heads, draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    parts = 1 if kind == "column" else draw(st.integers(2, 4))
    return EvenPartition(tuple(8 * draw(st.integers(1, 9)) for _ in range(parts)))


def blocks_of(
    partition: Partition, rank: int
) -> tuple[int, dict[int, Block], dict[int, list[int]]]:
    """Rows of the storage, each layout's block, and the storage's rows that are its shard."""
    whole = partition.padded().shard(1, 0)
    tp_ranks = {tp: Layout.of(tp, TPS[-1]).tp_rank_of(rank) for tp in TPS}
    pieces = {tp: pieces_of(partition.padded().shard(tp, at), whole) for tp, at in tp_ranks.items()}
    unit = common_unit(whole.size, pieces.values())
    shards = {
        tp: [row for piece in of_tp for row in range(piece.src, piece.src + piece.length)]
        for tp, of_tp in pieces.items()
    }
    return (
        whole.size,
        {tp: block_of(of_tp, whole.size, unit) for tp, of_tp in pieces.items()},
        shards,
    )


def apply(swaps: list[Swap], rows: list[int]) -> None:
    for a, b, n in ((one.a, one.b, one.length) for one in swaps):
        assert abs(a - b) >= n, "the two sides overlap"
        rows[a : a + n], rows[b : b + n] = rows[b : b + n], rows[a : a + n]


def orders_of(size: int, blocks: dict[int, Block]) -> dict[int, RowOrder]:
    original = RowOrder.original(size, blocks[1].unit)
    return {tp: original.bring(block) for tp, block in blocks.items()}


@given(partitions(), st.integers(0, 7), st.lists(st.sampled_from(TPS), max_size=8))
def test_a_walk_over_layouts(partition: Partition, rank: int, walk: list[int]) -> None:
    size, blocks, shards = blocks_of(partition, rank)
    orders = orders_of(size, blocks)
    assert orders[1] == RowOrder.original(size, blocks[1].unit)
    rows = list(range(size))
    at = 1
    for tp in [*walk, 1]:
        swaps = orders[at].swaps_to(orders[tp])
        apply([swap for of_round in rounds(swaps) for swap in of_round], rows)
        block, at = blocks[tp], tp
        assert rows[block.start : block.start + block.size] == shards[tp]
        unit = orders[tp].unit
        assert [one * unit for one in orders[tp].units] == rows[::unit]
    assert rows == list(range(size))


@given(partitions(), st.integers(0, 7), st.sampled_from(TPS), st.sampled_from(TPS))
def test_no_more_moves_than_the_shards_and_what_they_displace(
    partition: Partition, rank: int, source: int, target: int
) -> None:
    size, blocks, _ = blocks_of(partition, rank)
    orders = orders_of(size, blocks)
    shards = sum(blocks[tp].size for tp in (source, target) if tp > 1)
    assert rows_moved(orders[source].swaps_to(orders[target])) <= 2 * shards


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_rounds_keep_the_order_of_what_touches_the_same_rows(pairs: list[tuple[int, int]]) -> None:
    swaps = [Swap(a, b, 1) for a, b in pairs if a != b]
    made = rounds(swaps)
    assert [swap for of_round in made for swap in of_round] == swaps
    for of_round in made:
        touched = [row for swap in of_round for row in (swap.a, swap.b)]
        assert len(touched) == len(set(touched))


@pytest.mark.parametrize("partition", [EvenPartition((64,)), VocabPartition(100, 64)])
def test_a_plain_matrix_stays_as_it_is(partition: Partition) -> None:
    size, blocks, _ = blocks_of(partition, rank=5)
    for block in blocks.values():
        original = RowOrder.original(size, block.unit)
        assert original.bring(block) == original


def test_the_gate_stays_and_the_up_rows_come_to_it() -> None:
    """Llama-3.1-8B's gate_up on rank 1 of 2: a quarter of the rows trades with a quarter."""
    half = 14336 // 2
    _, blocks, _ = blocks_of(EvenPartition((14336, 14336)), rank=1)
    orders = orders_of(2 * 14336, blocks)
    swaps = orders[1].swaps_to(orders[2])
    assert rows_moved(swaps) == 2 * half
    assert len(rounds(swaps)) == 1

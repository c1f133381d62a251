"""Rows that trade places: every layout finds its shard, and the way back restores every row."""

from __future__ import annotations

import math

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
        heads = max(kv_heads * draw(st.sampled_from([1, 2, 4])), TPS[-1])
        return QKVPartition(heads, kv_heads, draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    parts = 1 if kind == "column" else draw(st.integers(2, 4))
    return EvenPartition(tuple(8 * draw(st.integers(1, 9)) for _ in range(parts)))


class Storage:
    """A weight as a rank of eight holds it, and where each tp's layout finds its shard there."""

    def __init__(self, partition: Partition, rank: int, banded: bool = False) -> None:
        whole = partition.padded().shard(1, 0)
        pieces = {
            tp: pieces_of(
                partition.padded().shard(tp, Layout.of(tp, TPS[-1]).tp_rank_of(rank)), whole
            )
            for tp in TPS
        }
        self.size = whole.size
        self.unit = common_unit(whole.size, pieces.values())
        self.original = RowOrder.original(self.size, self.unit)
        self.blocks: dict[int, Block] = {}
        self.orders: dict[int, RowOrder] = {}
        self.shards: dict[int, list[int]] = {}
        for tp, of_tp in pieces.items():
            self.blocks[tp] = block_of(of_tp, self.size, self.unit, banded)
            self.orders[tp] = self.original.bring(self.blocks[tp])
            self.shards[tp] = [
                row for piece in of_tp for row in range(piece.src, piece.src + piece.length)
            ]


storages = st.builds(Storage, partitions(), st.integers(0, 7), st.booleans())


def apply(swaps: list[Swap], rows: list[int]) -> None:
    for a, b, n in ((swap.a, swap.b, swap.length) for swap in swaps):
        assert abs(a - b) >= n, "the two sides overlap"
        rows[a : a + n], rows[b : b + n] = rows[b : b + n], rows[a : a + n]


@given(storages, st.lists(st.sampled_from(TPS), max_size=8))
def test_every_layout_finds_its_shard_and_the_way_back_restores_every_row(
    storage: Storage, walk: list[int]
) -> None:
    assert storage.orders[1] == storage.original
    rows = list(range(storage.size))
    at = 1
    for tp in [*walk, 1]:
        swaps = storage.orders[at].swaps_to(storage.orders[tp])
        apply([swap for of_round in rounds(swaps) for swap in of_round], rows)
        block, at = storage.blocks[tp], tp
        assert rows[block.start : block.start + block.size] == storage.shards[tp]
        assert [unit * storage.unit for unit in storage.orders[tp].units] == rows[:: storage.unit]
    assert rows == list(range(storage.size))


@given(partitions(), st.integers(0, 7))
def test_blocks_of_bands_begin_with_one_and_end_in_the_storage(
    partition: Partition, rank: int
) -> None:
    storage = Storage(partition, rank, banded=True)
    for block in storage.blocks.values():
        assert block.start % math.gcd(storage.size, block.size) == 0
        assert 0 <= block.start <= storage.size - block.size


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_rounds_keep_the_order_of_what_touches_the_same_rows(pairs: list[tuple[int, int]]) -> None:
    swaps = [Swap(a, b, 1) for a, b in pairs if a != b]
    in_rounds = rounds(swaps)
    assert [swap for of_round in in_rounds for swap in of_round] == swaps
    for of_round in in_rounds:
        touched = [row for swap in of_round for row in (swap.a, swap.b)]
        assert len(touched) == len(set(touched))


@pytest.mark.parametrize(
    ("partition", "banded", "moved"),
    [
        (EvenPartition((14336, 14336)), False, 7168),
        (EvenPartition((14336, 14336)), True, 7168),
        (QKVPartition(32, 8, 128, 128), False, 2 * 4 * 128),
        (EvenPartition((64,)), False, 0),
        (EvenPartition((64,)), True, 0),
    ],
)
def test_the_largest_part_stays_and_the_others_come_to_it(
    partition: Partition, banded: bool, moved: int
) -> None:
    """Llama-3.1-8B in two ranks: of gate and up, the up rows move, of q, k and v the latter two."""
    orders = Storage(partition, rank=1, banded=banded).orders
    swaps = orders[1].swaps_to(orders[2])
    assert rows_moved(swaps) == 2 * moved
    assert len(rounds(swaps)) == (moved > 0)

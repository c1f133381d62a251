"""The shards of all ranks cover the full tensor, and a rank's shards lie one within another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Experts, Layout
from pat_vllm.weights.shards import (
    Cut,
    EvenPartition,
    ExpertPartition,
    FirstPartition,
    Partition,
    Piece,
    QKVPartition,
    Shard,
    TiledPartition,
    VocabPartition,
    pieces_of,
)

TP = (1, 2, 3, 4, 6, 8)
PADDING = -1


def built(pieces: tuple[Piece, ...], size: int, rows: Sequence[int]) -> list[int]:
    """What copies make of `rows`; PADDING where none writes."""
    target = [PADDING] * size
    for piece in pieces:
        assert piece.length > 0
        written = slice(piece.dst, piece.dst + piece.length)
        assert set(target[written]) == {PADDING}, "two pieces write one row"
        target[written] = rows[piece.src : piece.src + piece.length]
    assert len(target) == size
    return target


def rows_of(shard: Shard) -> list[int]:
    """The full tensor's row at each row of a shard; PADDING where it is zero."""
    return built(shard.pieces, shard.size, range(1 << 30))


def all_rows(partition: Partition, tp: int) -> Counter[int]:
    return Counter(row for rank in range(tp) for row in rows_of(partition.shard(tp, rank)))


def common_multiples(tps: tuple[int, ...], high: int) -> list[int]:
    return [n for n in range(1, high) if all(n % tp == 0 for tp in tps)]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Partition, int, int]:
    """A partition and two tps that it can be cut by, the second a multiple of the first."""
    base = draw(st.sampled_from(TP))
    tps = base, draw(st.sampled_from([tp for tp in TP if tp % base == 0]))
    kind = draw(st.sampled_from(["even", "qkv", "vocab", "first"]))
    if kind == "first":
        return FirstPartition(draw(st.integers(1, 100))), *tps
    if kind == "even":
        sizes = st.lists(st.sampled_from(common_multiples(tps, 100)), min_size=1, max_size=3)
        return EvenPartition(tuple(draw(sizes)), dim=draw(st.integers(0, 1))), *tps
    if kind == "vocab":
        padding = draw(st.sampled_from(common_multiples(tps, 100)))
        return VocabPartition(draw(st.integers(1, 300)), padding), *tps
    kv_heads = [n for n in range(1, 25) if all(n % tp == 0 or tp % n == 0 for tp in tps)]
    return (
        QKVPartition(
            total_heads=draw(st.sampled_from(common_multiples(tps, 50))),
            total_kv_heads=draw(st.sampled_from(kv_heads)),
            head_size=draw(st.integers(1, 4)),
            v_head_size=draw(st.integers(1, 4)),
        ),
        *tps,
    )


@settings(max_examples=50)
@given(st.sampled_from(TP), st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_even_partition_covers_every_row_once(tp: int, multiples: list[int]) -> None:
    partition = EvenPartition(tuple(tp * m for m in multiples))
    assert all_rows(partition, tp) == Counter(range(tp * sum(multiples)))
    # Every rank has the same share of each of the fused matrices, in their order.
    for rank in range(tp):
        shard = partition.shard(tp, rank)
        assert [piece.length for piece in shard.pieces] == multiples
        assert rows_of(shard) == sorted(rows_of(shard))


@settings(max_examples=60)
@given(
    st.sampled_from(TP), st.integers(1, 4), st.integers(1, 24), st.integers(1, 4), st.integers(1, 4)
)
def test_qkv_partition_covers_queries_once_and_kv_heads_as_often_as_replicated(
    tp: int, heads_per_rank: int, kv_heads: int, head_size: int, v_head_size: int
) -> None:
    heads = tp * heads_per_rank
    partition = QKVPartition(heads, kv_heads, head_size, v_head_size)
    if tp % kv_heads and kv_heads % tp:
        with pytest.raises(ValueError, match="KV heads"):
            partition.shard(tp, 0)
        return
    copies = max(1, tp // kv_heads)
    q, k, v = heads * head_size, kv_heads * head_size, kv_heads * v_head_size
    expected = dict.fromkeys(range(q), 1) | dict.fromkeys(range(q, q + k + v), copies)
    assert all_rows(partition, tp) == Counter(expected)
    for rank in range(tp):
        # A rank has the value rows of the heads whose key rows it has.
        rows = rows_of(partition.shard(tp, rank))
        key_heads = {(row - q) // head_size for row in rows if q <= row < q + k}
        assert {(row - q - k) // v_head_size for row in rows if row >= q + k} == key_heads


@settings(max_examples=50)
@given(st.sampled_from(TP), st.integers(1, 500), st.integers(1, 12))
def test_vocab_partition_covers_every_row_once_and_pads_at_the_end(
    tp: int, vocab_size: int, multiple: int
) -> None:
    partition = VocabPartition(vocab_size, padding_size=tp * multiple)
    rows = [row for rank in range(tp) for row in rows_of(partition.shard(tp, rank))]
    assert rows[:vocab_size] == list(range(vocab_size))
    assert set(rows[vocab_size:]) <= {PADDING}
    assert len(rows) % partition.padding_size == 0
    assert len(rows) - vocab_size < partition.padding_size


@given(st.sampled_from(TP), st.integers(1, 100))
def test_the_first_rank_adds_what_all_add_once(tp: int, size: int) -> None:
    partition = FirstPartition(size)
    assert all_rows(partition, tp) == Counter(range(size)) + Counter({PADDING: (tp - 1) * size})
    cut = Cut(partition, "tp")
    assert [cut.nested(Layout.of(n, 4).place_of(3)) for n in (1, 2)] == [True, False]
    assert cut.nested(Layout.of(2, 4).place_of(3, "ep")), "whole experts have whole biases"


@given(st.sampled_from(TP), st.lists(st.integers(1, 9), min_size=1), *[st.integers(1, 4)] * 2)
def test_tiles_are_cut_as_their_rows_are(
    tp: int, multiples: list[int], unit: int, length: int
) -> None:
    matrix = EvenPartition(tuple(tp * unit * m for m in multiples))
    tiled = TiledPartition(matrix, 1, unit, length)
    for rank in range(tp):
        tiles = [row // unit for row in rows_of(matrix.shard(tp, rank))[::unit]]
        elements = [tile * length + i for tile in tiles for i in range(length)]
        assert rows_of(tiled.shard(tp, rank)) == elements
    with pytest.raises(ValueError, match="blocks of 5"):
        TiledPartition(EvenPartition((tp * 64,)), 1, 5, length).shard(tp, 0)


@given(cuts(), st.integers(1, 3))
def test_a_rank_has_its_shard_of_a_wider_layout(cut: tuple[Partition, int, int], more: int) -> None:
    partition, base_tp, tp = cut
    for rank in range(tp * more):
        target, base = (
            partition.shard(size, Layout.of(size, tp * more).tp_rank_of(rank))
            for size in (tp, base_tp)
        )
        assert target.size == partition.shard(tp, 0).size
        assert built(pieces_of(target, base), target.size, rows_of(base)) == rows_of(target)


@st.composite
def fused_experts(draw: st.DrawFn) -> tuple[tuple[Cut, Cut], Layout, Layout, Experts]:
    """How experts are cut, and two layouts of which the first has all that the second needs; how
    the experts lie in both."""
    base_tp, wider = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    tp = base_tp * wider
    kind: Experts = draw(st.sampled_from(["tp", "ep"]))
    ranks = tp * draw(st.integers(1, 2))
    experts = draw(st.integers(tp, 20)) if base_tp == 1 else tp * draw(st.integers(1, 4))
    sizes = (tp * draw(st.integers(1, 3)),) * draw(st.integers(1, 2))
    cuts = Cut(ExpertPartition(experts), "ep"), Cut(EvenPartition(sizes, dim=1), "tp")
    return cuts, Layout.of(base_tp, ranks), Layout.of(tp, ranks), kind


@given(fused_experts())
def test_a_group_has_every_row_of_every_expert_once_and_a_rank_those_of_a_wider_layout(
    case: tuple[tuple[Cut, Cut], Layout, Layout, Experts],
) -> None:
    cuts, base, layout, kind = case
    everything = [rows_of(cut.shard(Layout(1, 1).place_of(0))) for cut in cuts]
    spread = Counter(
        row
        for rank in layout.ranks_of(0)
        for row in product(*(rows_of(cut.shard(layout.place_of(rank, kind))) for cut in cuts))
    )
    assert spread == Counter(product(*everything))
    # Experts are whole, or every rank has all of them.
    experts, rows = (cut.shard(layout.place_of(0, kind)).size for cut in cuts)
    if kind == "ep":
        assert (experts, rows) == (-(-len(everything[0]) // layout.tp), len(everything[1]))
    else:
        assert (experts, rows) == (len(everything[0]), len(everything[1]) // layout.tp)
    for rank in range(layout.world_size):
        for cut in cuts:
            target, source = (cut.shard(side.place_of(rank, kind)) for side in (layout, base))
            pieces = pieces_of(target, source)
            assert cut.dim or len(pieces) == 1, "a range of experts is a view"
            assert built(pieces, target.size, rows_of(source)) == rows_of(target)


def test_replicated_kv_heads_are_in_both_shards() -> None:
    partition = QKVPartition(total_heads=4, total_kv_heads=1, head_size=1, v_head_size=1)
    base = partition.shard(2, 1)  # q, q, k, v
    expected = (Piece(1, 0, 1), Piece(2, 1, 1), Piece(3, 2, 1))
    assert pieces_of(partition.shard(4, 3), base) == expected
    partition = QKVPartition(total_heads=4, total_kv_heads=2, head_size=1, v_head_size=1)
    of_ranks = [rows_of(partition.shard(4, rank))[1:] for rank in range(4)]
    assert of_ranks == [[4, 6], [4, 6], [5, 7], [5, 7]], "consecutive ranks have the same head"


@pytest.mark.parametrize(
    ("partition", "tp", "numbers"),
    [
        (EvenPartition((6, 8)), 4, "matrix by tp: 6 .* 4"),
        (QKVPartition(6, 2, 8, 8), 4, "attention heads by tp: 6 .* 4"),
        (QKVPartition(12, 3, 8, 8), 2, "KV heads by tp: 3 .* 2"),
        (QKVPartition(12, 3, 8, 8), 4, "tp by KV heads: 4 .* 3"),
        (VocabPartition(100, 64), 3, "vocabulary rows by tp: 128 .* 3"),
        (ExpertPartition(3), 4, "3 experts .* tp=4"),
    ],
)
def test_what_does_not_divide_is_named(partition: Partition, tp: int, numbers: str) -> None:
    with pytest.raises(ValueError, match=numbers):
        partition.shard(tp, 0)

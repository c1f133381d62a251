"""The shards of all ranks cover the full tensor, and a rank's shards lie one within another."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Experts, Layout
from pat_vllm.weights.shards import (
    Cut,
    EvenPartition,
    ExpertPartition,
    Partition,
    Piece,
    QKVPartition,
    Shard,
    VocabPartition,
    pieces_of,
)

TP = (1, 2, 3, 4, 6, 8)
PADDING = -1


def rows_of(shard: Shard) -> list[int]:
    """The full tensor's row at each row of a shard; PADDING where it is zero."""
    rows = [PADDING] * shard.size
    for piece in shard.pieces:
        assert piece.length > 0
        for i in range(piece.length):
            assert rows[piece.dst + i] == PADDING, "two pieces write one row"
            rows[piece.dst + i] = piece.src + i
    return rows


def all_rows(partition: Partition, tp: int) -> Counter[int]:
    return Counter(row for rank in range(tp) for row in rows_of(partition.shard(tp, rank)))


def lcm_multiples(tps: tuple[int, ...], high: int) -> list[int]:
    return [n for n in range(1, high) if all(n % tp == 0 for tp in tps)]


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Partition, int, int]:
    """A partition and two tps that it can be cut by."""
    tps = draw(st.sampled_from(TP)), draw(st.sampled_from(TP))
    kind = draw(st.sampled_from(["even", "qkv", "vocab"]))
    if kind == "even":
        sizes = st.lists(st.sampled_from(lcm_multiples(tps, 100)), min_size=1, max_size=3)
        return EvenPartition(tuple(draw(sizes)), dim=draw(st.integers(0, 1))), *tps
    if kind == "vocab":
        padding = draw(st.sampled_from(lcm_multiples(tps, 100)))
        return VocabPartition(draw(st.integers(1, 300)), padding), *tps
    kv_heads = [n for n in range(1, 25) if all(n % tp == 0 or tp % n == 0 for tp in tps)]
    return (
        QKVPartition(
            total_heads=draw(st.sampled_from(lcm_multiples(tps, 50))),
            total_kv_heads=draw(st.sampled_from(kv_heads)),
            head_size=draw(st.integers(1, 4)),
            v_head_size=draw(st.integers(1, 4)),
        ),
        *tps,
    )


@given(st.sampled_from(TP), st.lists(st.integers(1, 20), min_size=1, max_size=3))
def test_even_partition_covers_every_row_once(tp, multiples):
    sizes = tuple(tp * m for m in multiples)
    rows = all_rows(EvenPartition(sizes), tp)
    assert rows == Counter(range(sum(sizes)))
    # Every rank has the same share of each of the fused matrices, in their order.
    for rank in range(tp):
        shard = EvenPartition(sizes).shard(tp, rank)
        assert [piece.length for piece in shard.pieces] == multiples
        assert rows_of(shard) == sorted(rows_of(shard))


@given(cuts())
def test_shards_of_all_ranks_are_equally_long(cut):
    partition, tp, _ = cut
    assert len({partition.shard(tp, rank).size for rank in range(tp)}) == 1


@given(
    st.sampled_from(TP), st.integers(1, 4), st.integers(1, 24), st.integers(1, 4), st.integers(1, 4)
)
def test_qkv_partition_covers_queries_once_and_kv_heads_as_often_as_replicated(
    tp, heads_per_rank, kv_heads, head_size, v_head_size
):
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


@given(st.sampled_from(TP), st.integers(1, 500), st.integers(1, 12))
def test_vocab_partition_covers_every_row_once_and_pads_at_the_end(tp, vocab_size, multiple):
    partition = VocabPartition(vocab_size, padding_size=tp * multiple)
    rows = [row for rank in range(tp) for row in rows_of(partition.shard(tp, rank))]
    assert rows[:vocab_size] == list(range(vocab_size))
    assert set(rows[vocab_size:]) <= {PADDING}
    assert len(rows) % partition.padding_size == 0
    assert len(rows) - vocab_size < partition.padding_size


@given(cuts(), st.integers(1, 3))
def test_a_rank_has_its_shard_of_a_wider_layout(cut, more):
    partition, base_tp, tp = cut
    tp, world_size = max(base_tp, tp), max(base_tp, tp) * more
    if tp % base_tp:
        return
    for rank in range(world_size):
        target, base = (
            partition.shard(one, Layout.of(one, world_size).tp_rank_of(rank))
            for one in (tp, base_tp)
        )
        rows = rows_of(base)
        built = [PADDING] * target.size
        for piece in pieces_of(target, base):
            assert piece.length > 0
            assert set(built[piece.dst : piece.dst + piece.length]) == {PADDING}
            built[piece.dst : piece.dst + piece.length] = rows[piece.src :][: piece.length]
        assert built == rows_of(target)


@st.composite
def fused_experts(draw: st.DrawFn) -> tuple[tuple[Cut, Cut], Layout, Layout]:
    """How experts are cut, and two layouts of which the first has all that the second needs."""
    base_tp, wider = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    tp = base_tp * wider
    kind: Experts = draw(st.sampled_from(["tp", "ep"]))
    world_size = tp * draw(st.integers(1, 2))
    experts = draw(st.integers(tp, 20)) if base_tp == 1 else tp * draw(st.integers(1, 4))
    sizes = (tp * draw(st.integers(1, 3)),) * draw(st.integers(1, 2))
    return (
        (Cut(ExpertPartition(experts), "ep"), Cut(EvenPartition(sizes, dim=1), "tp")),
        layout_of(base_tp, world_size, kind),
        layout_of(tp, world_size, kind),
    )


def layout_of(tp: int, world_size: int, kind: Experts) -> Layout:
    return Layout.of(tp, world_size, kind if tp > 1 else "tp")


@given(fused_experts())
def test_a_group_has_every_row_of_every_expert_once(case):
    cuts, _, layout = case
    found = Counter(
        row
        for rank in layout.ranks_of(0)
        for row in product(*(rows_of(cut.shard(layout.place_of(rank))) for cut in cuts))
    )
    experts, rows = (rows_of(cut.shard(Layout(1, 1).place_of(0))) for cut in cuts)
    assert found == Counter(product(experts, rows))


@given(fused_experts())
def test_experts_are_whole_or_every_rank_has_all_of_them(case):
    (whole, inside), _, layout = case
    sizes = [cut.shard(layout.place_of(0)).size for cut in (whole, inside)]
    assert isinstance(whole.partition, ExpertPartition)
    assert isinstance(inside.partition, EvenPartition)
    experts, rows = whole.partition.num_experts, sum(inside.partition.sizes)
    if layout.experts == "ep":
        assert sizes == [-(-experts // layout.tp), rows]
    else:
        assert sizes == [experts, rows // layout.tp]


@given(fused_experts())
def test_a_rank_has_its_experts_of_a_wider_layout(case):
    cuts, base, layout = case
    for rank in range(layout.world_size):
        for cut in cuts:
            target, source = (cut.shard(one.place_of(rank)) for one in (layout, base))
            rows, built = rows_of(source), [PADDING] * target.size
            pieces = pieces_of(target, source)
            assert cut.dim or len(pieces) == 1, "a range of experts is a view"
            for piece in pieces:
                built[piece.dst : piece.dst + piece.length] = rows[piece.src :][: piece.length]
            assert built == rows_of(target)


def test_of_a_whole_tensor_the_pieces_are_the_shard_itself():
    for partition in (EvenPartition((8, 4)), QKVPartition(8, 2, 4, 4), VocabPartition(100, 64)):
        for rank in range(4):
            shard = partition.shard(4, rank)
            assert pieces_of(shard, partition.shard(1, 0)) == shard.pieces


def test_replicated_kv_heads_are_in_both_shards():
    partition = QKVPartition(total_heads=4, total_kv_heads=1, head_size=1, v_head_size=1)
    base = partition.shard(2, 1)  # q, q, k, v
    expected = (Piece(1, 0, 1), Piece(2, 1, 1), Piece(3, 2, 1))
    assert pieces_of(partition.shard(4, 3), base) == expected


@pytest.mark.parametrize(
    ("partition", "tp", "message"),
    [
        (EvenPartition((6, 8)), 4, "rows of a matrix by tp: 6 is not a multiple of 4"),
        (QKVPartition(6, 2, 8, 8), 4, "attention heads by tp: 6 is not a multiple of 4"),
        (QKVPartition(12, 3, 8, 8), 2, "KV heads by tp: 3 is not a multiple of 2"),
        (QKVPartition(12, 3, 8, 8), 4, "tp by KV heads: 4 is not a multiple of 3"),
        (VocabPartition(100, 64), 3, "padded vocabulary rows by tp: 128 is not a multiple of 3"),
        (ExpertPartition(3), 4, "3 experts cannot be spread over tp=4"),
    ],
)
def test_what_does_not_divide_is_named(partition, tp, message):
    with pytest.raises(ValueError, match=message):
        partition.shard(tp, 0)

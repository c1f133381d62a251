"""Which layouts a mixture of experts can have, by the sizes of its experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.mixture import Mixture, WantedExperts
from pat_vllm.weights.shards import Cut, EvenPartition, ExpertPartition, pieces_of

QWEN3_30B_A3B = Mixture(num_experts=128, intermediate=768)


def names(
    mixture: Mixture, tps: tuple[int, ...], ranks: int, wanted: WantedExperts = "auto"
) -> list[str]:
    return [str(layout) for layout in mixture.layouts(tps, ranks, wanted)]


def test_both_kinds_where_every_rank_has_all_experts() -> None:
    both = ["tp1dp4", "tp2dp2", "tp2dp2ep", "tp4dp1", "tp4dp1ep"]
    assert names(QWEN3_30B_A3B, (4, 1, 2), 4) == both
    assert names(QWEN3_30B_A3B, (1, 2, 4), 4, "tp") == ["tp1dp4", "tp2dp2", "tp4dp1"]
    assert names(QWEN3_30B_A3B, (1, 2, 4), 4, "ep") == ["tp1dp4", "tp2dp2ep", "tp4dp1ep"]


def test_one_kind_above_a_base_layout_of_several_ranks() -> None:
    assert names(QWEN3_30B_A3B, (2, 4), 4) == ["tp2dp2", "tp4dp1"]
    assert names(QWEN3_30B_A3B, (2, 4), 4, "ep") == ["tp2dp2ep", "tp4dp1ep"]


def test_only_what_fits() -> None:
    narrow, few = Mixture(8, intermediate=6), Mixture(3, intermediate=64)
    assert names(narrow, (1, 2, 4), 4) == ["tp1dp4", "tp2dp2", "tp2dp2ep", "tp4dp1ep"]
    assert names(few, (1, 2, 4), 4) == ["tp1dp4", "tp2dp2", "tp2dp2ep", "tp4dp1"]
    assert names(few, (1, 2), 4, "ep") == ["tp1dp4", "tp2dp2ep"]


@pytest.mark.parametrize(
    ("mixture", "tps", "wanted", "message"),
    [
        (Mixture(8, 6), (1, 4), "tp", "tp=4 .*'tp': experts of width 6 cannot be cut 4 ways"),
        (Mixture(3, 64), (1, 4), "ep", "tp=4 .*'ep': 3 experts cannot be spread over 4 ranks"),
        (Mixture(3, 6), (1, 4), "auto", "tp=4 .*'auto': experts of width 6 .*; 3 experts cannot"),
        (Mixture(8, 6), (2, 4), "auto", "tp=4 .*'auto': experts of width 6 cannot be cut 4 ways"),
        (Mixture(10, 64), (2, 4), "ep", "tp=4 .*10 experts do not divide .* with base_tp=2"),
    ],
)
def test_what_does_not_fit_is_named(
    mixture: Mixture, tps: tuple[int, ...], wanted: WantedExperts, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        mixture.layouts(tps, 4, wanted)


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([(1, 2), (1, 2, 4, 8), (2, 4), (2, 8), (3, 6), (1, 3, 6)]),
    st.sampled_from(["auto", "tp", "ep"]),
)
def test_a_rank_has_the_experts_of_every_layout(
    num_experts: int, intermediate: int, tps: tuple[int, ...], wanted: WantedExperts
) -> None:
    ranks = max(tps)
    try:
        base, *wider = Mixture(num_experts, intermediate).layouts(tps, ranks, wanted)
    except ValueError:
        return
    assert {layout.tp for layout in (base, *wider)} == set(tps)
    cuts = (
        Cut(ExpertPartition(num_experts), "ep"),
        Cut(EvenPartition((intermediate,) * 2, dim=1), "tp"),
    )
    for rank in range(ranks):
        for cut in cuts:
            held = cut.shard(base.place_of(rank))
            for layout in wider:
                needed = cut.shard(layout.place_of(rank))
                filled = sum(piece.length for piece in pieces_of(needed, held))
                assert filled == needed.size, "not all is in the base layout's shard"


def test_configs() -> None:
    qwen3 = {"num_experts": 128, "moe_intermediate_size": 768, "intermediate_size": 6144}
    assert Mixture.from_config(qwen3) == QWEN3_30B_A3B
    mixtral = {"num_local_experts": 8, "intermediate_size": 14336}
    assert Mixture.from_config(mixtral) == Mixture(8, 14336)
    glm = {"n_routed_experts": 128, "moe_intermediate_size": 1408, "intermediate_size": 10944}
    assert Mixture.from_config(glm) == Mixture(128, 1408)
    assert Mixture.from_config({"intermediate_size": 14336, "num_experts": 0}) is None


def test_kinds_of_one_tp_are_different_layouts_of_the_same_groups() -> None:
    cut, spread = (Layout.of(2, 4, kind) for kind in ("tp", "ep"))
    assert cut != spread
    assert [cut.ranks_of(i) for i in range(2)] == [spread.ranks_of(i) for i in range(2)]

"""Which layouts a mixture of experts can have, by the sizes of its experts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.mixture import Mixture, WantedExperts
from pat_vllm.weights.shards import Cut, EvenPartition, ExpertPartition, pieces_of

QWEN3_30B_A3B = Mixture(num_experts=128, intermediate=768)
NARROW, FEW = Mixture(8, intermediate=6), Mixture(3, intermediate=64)


@pytest.mark.parametrize(
    ("mixture", "tps", "wanted", "expected"),
    [
        (QWEN3_30B_A3B, (4, 1, 2), "auto", "tp1dp4 tp2dp2 tp2dp2ep tp4dp1 tp4dp1ep"),
        (QWEN3_30B_A3B, (1, 2, 4), "tp", "tp1dp4 tp2dp2 tp4dp1"),
        (QWEN3_30B_A3B, (1, 2, 4), "ep", "tp1dp4 tp2dp2ep tp4dp1ep"),
        # One kind above a base layout of several ranks.
        (QWEN3_30B_A3B, (2, 4), "auto", "tp2dp2 tp4dp1"),
        (QWEN3_30B_A3B, (2, 4), "ep", "tp2dp2ep tp4dp1ep"),
        # Only what fits.
        (NARROW, (1, 2, 4), "auto", "tp1dp4 tp2dp2 tp2dp2ep tp4dp1ep"),
        (FEW, (1, 2, 4), "auto", "tp1dp4 tp2dp2 tp2dp2ep tp4dp1"),
        (FEW, (1, 2), "ep", "tp1dp4 tp2dp2ep"),
        (Mixture(4, 64), (1, 4), "ep", "tp1dp4 tp4dp1ep"),
    ],
)
def test_layouts(
    mixture: Mixture, tps: tuple[int, ...], wanted: WantedExperts, expected: str
) -> None:
    assert " ".join(map(str, mixture.layouts(tps, 4, wanted))) == expected


@pytest.mark.parametrize(
    ("mixture", "tps", "wanted", "reason"),
    [
        (NARROW, (1, 4), "tp", "width 6 cannot be cut 4 ways"),
        (FEW, (1, 4), "ep", "3 experts cannot be spread over 4 ranks"),
        (Mixture(3, 6), (1, 4), "auto", "width 6 .*; 3 experts cannot"),
        (NARROW, (2, 4), "auto", "width 6 cannot be cut 4 ways"),
        (Mixture(10, 64), (2, 4), "ep", "10 experts do not divide .*base_tp=2"),
    ],
)
def test_what_does_not_fit_is_named(
    mixture: Mixture, tps: tuple[int, ...], wanted: WantedExperts, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"tp=4 with pat.experts='{wanted}': .*{reason}"):
        mixture.layouts(tps, 4, wanted)


@settings(max_examples=60)
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
    """Field names of Qwen3, Mixtral and GLM; a dense model."""
    for config, expected in (
        ({"num_experts": 128, "moe_intermediate_size": 768, "intermediate_size": 6144}, (128, 768)),
        ({"num_local_experts": 8, "intermediate_size": 14336}, (8, 14336)),
        (
            {"n_routed_experts": 96, "moe_intermediate_size": 1408, "intermediate_size": 10944},
            (96, 1408),
        ),
    ):
        assert Mixture.from_config(config) == Mixture(*expected)
    assert Mixture.from_config({"intermediate_size": 14336, "num_experts": 0}) is None


def test_kinds_of_one_tp_are_different_layouts_of_the_same_groups() -> None:
    cut, spread = (Layout.of(2, 4, kind) for kind in ("tp", "ep"))
    assert cut != spread
    assert [cut.ranks_of(i) for i in range(2)] == [spread.ranks_of(i) for i in range(2)]

"""Which layouts a mixture of experts can have, by the sizes of its experts."""

from __future__ import annotations

import pytest

from pat_vllm.models.moe_config import MoEConfig, WantedExperts

QWEN3_30B_A3B = MoEConfig(num_experts=128, intermediate=768)
NARROW, FEW = MoEConfig(8, intermediate=6), MoEConfig(3, intermediate=64)


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
        (MoEConfig(4, 64), (1, 4), "ep", "tp1dp4 tp4dp1ep"),
    ],
)
def test_layouts(
    mixture: MoEConfig, tps: tuple[int, ...], wanted: WantedExperts, expected: str
) -> None:
    assert " ".join(map(str, mixture.layouts(tps, 4, wanted))) == expected


@pytest.mark.parametrize(
    ("mixture", "tps", "wanted", "reason"),
    [
        (NARROW, (1, 4), "tp", "width 6 cannot be cut 4 ways"),
        (FEW, (1, 4), "ep", "3 experts cannot be spread over 4 ranks"),
        (MoEConfig(3, 6), (1, 4), "auto", "width 6 .*; 3 experts cannot"),
        (NARROW, (2, 4), "auto", "width 6 cannot be cut 4 ways"),
        (MoEConfig(10, 64), (2, 4), "ep", "10 experts do not divide .*base_tp=2"),
    ],
)
def test_what_does_not_fit_is_named(
    mixture: MoEConfig, tps: tuple[int, ...], wanted: WantedExperts, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"tp=4 with pat.experts='{wanted}': .*{reason}"):
        mixture.layouts(tps, 4, wanted)

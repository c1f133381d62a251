"""How a mixture's experts can lie, by their sizes."""

from __future__ import annotations

import pytest

from pat_vllm.layout import Experts
from pat_vllm.models.moe_config import MoEConfig, WantedExperts

QWEN3_30B_A3B = MoEConfig(num_experts=128, intermediate=768)
NARROW, FEW = MoEConfig(8, intermediate=6), MoEConfig(3, intermediate=64)


@pytest.mark.parametrize(
    ("mixture", "tps", "wanted", "expected"),
    [
        (QWEN3_30B_A3B, (4, 1, 2), "auto", "tp"),
        (QWEN3_30B_A3B, (2, 4), "auto", "tp"),
        (QWEN3_30B_A3B, (1, 2, 4), "ep", "ep"),
        (QWEN3_30B_A3B, (2, 4), "ep", "ep"),
        # Cut where all layouts can, else spread.
        (NARROW, (1, 2), "auto", "tp"),
        (NARROW, (1, 2, 4), "auto", "ep"),
        (NARROW, (2, 4), "auto", "ep"),
        (FEW, (1, 2, 4), "auto", "tp"),
        (FEW, (1, 2), "ep", "ep"),
        (MoEConfig(4, 64), (1, 4), "ep", "ep"),
    ],
)
def test_resolved(
    mixture: MoEConfig, tps: tuple[int, ...], wanted: WantedExperts, expected: Experts
) -> None:
    assert mixture.resolve(wanted, tps) == expected


@pytest.mark.parametrize(
    ("mixture", "tps", "wanted", "reason"),
    [
        (NARROW, (1, 2, 4), "tp", "tp=4: experts of width 6 cannot be cut 4 ways"),
        (FEW, (1, 2, 4), "ep", "tp=4: 3 experts cannot be spread over 4 ranks"),
        (MoEConfig(3, 6), (1, 4), "auto", "tp=4: .* width 6 .*; layout tp=4: 3 experts cannot"),
        (MoEConfig(10, 6), (2, 4), "auto", "tp=4: .* width 6 .*; layout tp=4: 10 experts do not"),
        (MoEConfig(10, 64), (2, 4), "ep", "tp=4: 10 experts do not divide .*base_tp=2"),
    ],
)
def test_what_does_not_fit_is_named(
    mixture: MoEConfig, tps: tuple[int, ...], wanted: WantedExperts, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"pat.experts='{wanted}': layout {reason}"):
        mixture.resolve(wanted, tps)

"""Whether an engine's tokens and log-probabilities are stock vLLM's."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pat_vllm.doctor.compare import LEAST_TOLERANCE, Comparison, Differs, Output, Reference

STOCK = (
    Output((5, 6), (-0.1, -0.2), ({5: -0.1, 9: -0.1002}, {6: -0.2, 8: -3.0})),
    Output((7,), (-1.0,), ({7: -1.0},)),
)
REFERENCE = Reference(STOCK, ((-0.1, -0.2), (-1.0,)))


def ours(tokens: tuple[int, ...] = (5, 6), *logprobs: float) -> list[Output]:
    """STOCK as another engine would have it, its first request changed."""
    return [Output(tokens, logprobs or (-0.1, -0.2)[: len(tokens)]), Output((7,), (-1.0,))]


def test_the_same_and_what_is_close_agree() -> None:
    agreement = REFERENCE.compare_outputs(ours((5, 6), -0.10005, -0.2), 1e-4)
    assert (agreement.compared, agreement.ties) == (3, 0)
    assert agreement.worst == pytest.approx(5e-5)
    assert REFERENCE.compare_forced(REFERENCE.forced).compared == 3
    with pytest.raises(Differs, match=r"token 1 \(as a prompt's\)"):
        REFERENCE.compare_forced(((-0.1, -0.9), (-1.0,)))
    both = agreement + Comparison(2, 1, 2e-5)
    assert str(both) == "5 tokens, log-probabilities within 5.0e-05, 1 ties"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (ours((5, 6), -0.1, -0.2003), "wrong log-probability: request 0, token 1 has -0.200300"),
        (ours((5, 6), -0.1, math.nan), "wrong log-probability"),
        (ours((5, 8)), "wrong token: request 0, token 1 is 8, in stock vLLM 6"),
        (ours((5, 3)), "is not among its likeliest"),
        (ours((5,)), "request 0 has 1 tokens instead of 2"),
    ],
)
def test_differences_are_named(changed: list[Output], words: str) -> None:
    with pytest.raises(Differs, match=words):
        REFERENCE.compare_outputs(changed, 1e-4)


def test_a_tie_is_no_mistake_and_ends_the_comparison() -> None:
    agreement = REFERENCE.compare_outputs(ours((9, 1), -0.1001, -7.0), LEAST_TOLERANCE)
    assert (agreement.ties, agreement.compared) == (1, 1)


def test_the_tolerance_follows_stock_vllms_own_noise() -> None:
    def scored(first: float) -> Reference:
        return dataclasses.replace(REFERENCE, forced=((first, -0.2), (-1.0,)))

    assert REFERENCE.noise == 0.0 and REFERENCE.tolerance == LEAST_TOLERANCE
    assert scored(-0.11).tolerance == pytest.approx(0.04)
    scored(-0.11).check()
    assert dataclasses.replace(REFERENCE, rounding=0.02).tolerance == pytest.approx(0.08)
    assert REFERENCE.apart([(-0.1, -0.5), (-1.0,)]) == pytest.approx(0.3)
    for wrong in (-5.0, math.nan):
        with pytest.raises(Differs, match="does not agree with itself"):
            scored(wrong).check()

"""Whether an engine's tokens and log-probabilities are stock vLLM's."""

from __future__ import annotations

import dataclasses
import json
import math
from io import StringIO

import pytest

from pat_vllm.doctor.compare import (
    LEAST_TOLERANCE,
    Agreement,
    Output,
    Reference,
    compare_forced,
    compare_outputs,
)
from pat_vllm.doctor.journal import Ended, Journal

STOCK = (
    Output((5, 6), (-0.1, -0.2), ({5: -0.1, 9: -0.1002}, {6: -0.2, 8: -3.0})),
    Output((7,), (-1.0,), ({7: -1.0},)),
)
REFERENCE = Reference(STOCK, ((-0.1, -0.2), (-1.0,)))


def ours(tokens: tuple[int, ...] = (5, 6), *logprobs: float) -> list[Output]:
    """STOCK as another engine would have it, its first request changed."""
    return [Output(tokens, logprobs or (-0.1, -0.2)[: len(tokens)]), Output((7,), (-1.0,))]


def test_the_same_and_what_is_close_agree() -> None:
    found = compare_outputs(STOCK, ours((5, 6), -0.10005, -0.2), 1e-4)
    assert (found.problem, found.compared, found.ties) == (None, 3, 0)
    assert found.worst == pytest.approx(5e-5)
    scores = compare_forced(REFERENCE.forced, REFERENCE.forced, 1e-4)
    assert (scores.problem, scores.compared) == (None, 3)
    other = compare_forced(REFERENCE.forced, ((-0.1, -0.9), (-1.0,)), 1e-4)
    assert "token 1 (as a prompt's)" in (other.problem or "")


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
    assert words in (compare_outputs(STOCK, changed, 1e-4).problem or "")


def test_a_tie_is_no_mistake_and_ends_the_comparison() -> None:
    found = compare_outputs(STOCK, ours((9, 1), -0.1001, -7.0), LEAST_TOLERANCE)
    assert (found.problem, found.ties, found.compared) == (None, 1, 1)


def test_the_tolerance_follows_stock_vllms_own_noise() -> None:
    def scored(first: float) -> Reference:
        return dataclasses.replace(REFERENCE, forced=((first, -0.2), (-1.0,)))

    assert REFERENCE.noise == 0.0 and REFERENCE.tolerance == LEAST_TOLERANCE
    assert scored(-0.11).tolerance == pytest.approx(0.04)
    assert scored(-0.11).problem is None
    assert "does not agree with itself" in (scored(-5.0).problem or "")
    assert scored(math.nan).problem is not None


def test_a_journal_tells_what_was_found_and_what_is_wrong() -> None:
    file = StringIO()
    journal = Journal(file)
    with journal.check("fine") as found:
        found += ["a few words", {"ms": 3}, Agreement(4, 0, 1e-5), Agreement(2, 1, 2e-5)]
    for raised in (None, RuntimeError("no")):
        with pytest.raises(Ended), journal.check("wrong") as found:
            found.append(Agreement(1, 0, 0.5, "wrong token"))
            if raised:
                raise raised
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line["doing"] for line in lines[::2]] == ["fine", "wrong", "wrong"]
    fine, wrong, failed = (line["check"] for line in lines[1::2])
    words = "a few words; 6 tokens, log-probabilities within 2.0e-05, 1 ties"
    assert (fine["found"], fine["values"], fine["problem"]) == (words, {"ms": 3}, None)
    assert (wrong["problem"], failed["problem"]) == ("wrong token", "RuntimeError: no")

"""How well lengths are known from the epoch before, on known numbers."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.rollouts.lengths import length_errors
from benchmarks.rollouts.records import Response


def responses(lengths: dict[int, list[int]]) -> list[Response]:
    return [
        Response(prompt, 0, np.zeros(n, np.int32), 0.0, 0.0, 0.0, 0.0)
        for prompt, each in lengths.items()
        for n in each
    ]


def test_prompts_with_lengths_of_their_own_are_known_by_them() -> None:
    """Prompt p has responses of 2^p tokens; the median of all is 2^4.5 or so."""
    each = {p: [2**p] * 8 for p in range(10)}
    errors = length_errors(responses(each), responses(each))
    assert errors.by_prompt == 0 and errors.found == 1
    median = np.log2(np.median([2**p for p in range(10)]))
    assert errors.alike == pytest.approx(np.mean([abs(p - median) for p in range(10)]))


def test_lengths_that_have_nothing_to_do_with_prompts_are_not() -> None:
    random = np.random.default_rng(0)

    def epoch() -> list[Response]:
        return responses({p: list(2 ** random.integers(4, 10, 8)) for p in range(200)})

    errors = length_errors(epoch(), epoch())
    assert errors.by_prompt > errors.alike
    assert errors.found == pytest.approx(0.2, abs=0.08)

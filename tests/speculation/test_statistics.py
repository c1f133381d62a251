"""The tests of draws themselves: right draws pass as often as they say, and wrong ones do not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.random import Generator

from tests.speculation.law import NAMINGS, Draws, Floats, Ints, Sampling, chi_square, independence

VOCAB, LENGTH = 6, 4


def law_of_next() -> Floats:
    """[previous token, next token]."""
    logits = np.random.default_rng(1).normal(size=(VOCAB, VOCAB), scale=1.5)
    return Sampling().law(logits)


def drawn(rng: Generator, responses: int, law: Floats, wrong: Floats | None = None) -> Draws:
    """Responses that follow `wrong`, where it is given, and claim to follow `law`."""
    tokens: Ints = np.zeros((responses, LENGTH), dtype=np.int64)
    laws = np.empty((responses, LENGTH, VOCAB))
    before = np.zeros(responses, dtype=np.int64)
    for position in range(LENGTH):
        laws[:, position] = law[before]
        sums = (law if wrong is None else wrong)[before].cumsum(-1)
        before = (rng.random((responses, 1)) > sums[:, :-1]).sum(-1)
        tokens[:, position] = before
    return Draws(tokens, laws)


def test_right_draws_are_as_improbable_as_the_tests_say() -> None:
    rng, law = np.random.default_rng(2), law_of_next()
    found = []
    for _ in range(250):
        draws = drawn(rng, 1_000, law)
        found += [
            *(chi_square(*naming(draws, LENGTH - 1)) for naming in NAMINGS.values()),
            independence(draws, LENGTH - 1, [(2 * i, 2 * i + 1) for i in range(500)]),
        ]
    for one in np.array(found).reshape(250, -1).T:
        # Of 250, 25 +- 4.7 and 125 +- 7.9.
        assert 11 <= (one < 0.1).sum() <= 39
        assert 101 <= (one < 0.5).sum() <= 149


def test_another_temperature_is_seen() -> None:
    law = law_of_next()
    wrong = law**0.8 / (law**0.8).sum(-1, keepdims=True)
    draws = drawn(np.random.default_rng(3), 5_000, law, wrong)
    assert chi_square(*NAMINGS["likelihood"](draws, LENGTH - 1)) < 1e-6


def test_a_wrong_context_is_seen_where_tokens_look_right() -> None:
    """Contexts trade their laws. How often each token comes hardly changes."""
    law = law_of_next()
    order = np.array([1, 0, 3, 2, 5, 4])
    law = np.concatenate([law[:3], law[:3, order]])
    uniform = np.full((VOCAB, VOCAB), 1 / VOCAB)
    rng = np.random.default_rng(4)
    before = drawn(rng, 5_000, uniform).tokens[:, 0]
    tokens = (rng.random((5_000, 1)) > law[(before + 3) % VOCAB].cumsum(-1)[:, :-1]).sum(-1)
    draws = Draws(np.stack([before, tokens], 1), np.stack([uniform[before], law[before]], 1))
    assert chi_square(*NAMINGS["likelihood"](draws, 1)) < 1e-12


def test_numbers_that_come_again_are_seen() -> None:
    law = np.tile(law_of_next()[0], (VOCAB, 1))  # contexts do not matter
    draws = drawn(np.random.default_rng(5), 2_000, law)
    tokens = draws.tokens.copy()
    tokens[:500, 3] = tokens[:500, 0]  # of one response, in a quarter of them
    again = Draws(tokens, draws.laws)
    assert chi_square(*NAMINGS["token"](again, 3)) > 1e-3
    assert chi_square(*NAMINGS["first token"](again, 3)) < 1e-12

    tokens = draws.tokens.copy()
    tokens[1000:1100] = tokens[:100]  # of two responses, in a tenth of the pairs
    again = Draws(tokens, draws.laws)
    pairs = [(i, 1_000 + i) for i in range(1_000)]
    assert independence(draws, 1, pairs) > 1e-3
    assert independence(again, 1, pairs) < 1e-6


def test_a_law_with_top_k() -> None:
    logits = np.log([0.5, 0.3, 0.2])
    assert Sampling().law(logits) == pytest.approx([0.5, 0.3, 0.2])
    assert Sampling(top_k=2).law(logits) == pytest.approx([0.625, 0.375, 0])
    assert Sampling(temperature=0.5).law(logits[:2]) == pytest.approx([25 / 34, 9 / 34])

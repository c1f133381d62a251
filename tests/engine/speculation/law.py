"""Whether sampled tokens follow the law of the model: exact probabilities, and tests of draws.

A response is drawn token by token, and what has been drawn changes what comes next. So there is no
table of independent draws to compare with. But each token has an exact law given the tokens before
it, which a plain forward pass of the whole text tells. At one position of all responses, the count
of a token minus the sum of its probabilities is a sum of differences with mean zero, whatever the
texts before them are. It is as good as normal for thousands of responses, with a covariance that
the probabilities tell, too (martingale central limit theorem). Its square in units of that
covariance is chi-square.

A chi-square over tokens does not see every mistake, because mistakes of many contexts may cancel.
So the outcomes of each draw are also named in other ways (`NAMINGS`), each of which a family of
mistakes cannot hide from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import chi2, norm

LEAST_VARIANCE = 20.0
"""Of a count: below it, its law is too far from normal for chi-square."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Draws:
    """Responses of one length to one prompt.

    Attributes:
        tokens: [responses, length].
        laws: [responses, length, vocab], the probability of every token given those before it.
    """

    tokens: Ints
    laws: Floats


@dataclass(frozen=True)
class Sampling:
    """By what a request's tokens are drawn. `top_k` 0 is all tokens."""

    temperature: float = 1.0
    top_k: int = 0

    def law(self, logits: Floats) -> Floats:
        """Probabilities along the last axis."""
        if self.top_k:
            least = np.sort(logits, axis=-1)[..., -self.top_k, None]
            logits = np.where(logits < least, -np.inf, logits)
        scaled = logits / self.temperature
        odds: Floats = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
        return odds / odds.sum(axis=-1, keepdims=True)


@torch.inference_mode()
def teacher_forced(model: Any, prompt: Sequence[int], tokens: Ints) -> Floats:
    """Logits before each token of responses to a prompt, by a Hugging Face model.

    Args:
        tokens: [responses, length].

    Returns:
        [responses, length, vocab].
    """
    texts, of_text = np.unique(tokens, axis=0, return_inverse=True)
    pieces = []
    for chunk in np.array_split(texts, -(-len(texts) // 2048)):
        step = model(torch.tensor([prompt]))
        cache, first = step.past_key_values, step.logits[:, -1:].expand(len(chunk), -1, -1)
        cache.batch_repeat_interleave(len(chunk))
        rest = model(torch.from_numpy(chunk[:, :-1]), past_key_values=cache).logits
        pieces.append(torch.cat([first, rest], 1))
    logits: Floats = torch.cat(pieces).double().numpy()
    return logits[of_text.reshape(-1)]


# -------------------------------------------------------------------- how outcomes are named

Naming = Callable[[Draws, int], tuple[Ints, Floats]]
"""Draws and a position -> [responses] names drawn, [responses, vocab] probabilities by name."""


def _by(order: Ints, draws: Draws, position: int) -> tuple[Ints, Floats]:
    """Name token `order[i, name]` of response i `name`."""
    named = np.argmax(order == draws.tokens[:, position, None], axis=-1)
    return named, np.take_along_axis(draws.laws[:, position], order, axis=-1)


def by_token(draws: Draws, position: int) -> tuple[Ints, Floats]:
    """Every token by itself."""
    return draws.tokens[:, position], draws.laws[:, position]


def by_likelihood(draws: Draws, position: int) -> tuple[Ints, Floats]:
    """The likeliest token of each context is 0: draws in a wrong context show."""
    return _by(np.argsort(-draws.laws[:, position], axis=-1), draws, position)


def by_first_token(draws: Draws, position: int) -> tuple[Ints, Floats]:
    """The token with which the response began is 0: random numbers that come again show."""
    vocab = draws.laws.shape[-1]
    return _by((draws.tokens[:, :1] + np.arange(vocab)) % vocab, draws, position)


NAMINGS: dict[str, Naming] = {
    "token": by_token,
    "likelihood": by_likelihood,
    "first token": by_first_token,
}


# -------------------------------------------------------------------- tests


def chi_square(drawn: Ints, laws: Floats) -> float:
    """How probable counts are that are at least as far from their expectation.

    Args:
        drawn: [draws].
        laws: [draws, outcomes], what the probability of each outcome was.
    """
    counts = np.bincount(drawn, minlength=laws.shape[1])
    expected = laws.sum(0)
    covariance = np.diag(expected) - laws.T @ laws
    often = np.flatnonzero(np.diag(covariance) >= LEAST_VARIANCE)
    # The others determine the count of the most frequent.
    cells = often[often != expected.argmax()]
    if not len(cells):
        return 1.0
    off = (counts - expected)[cells]
    statistic = off @ np.linalg.solve(covariance[np.ix_(cells, cells)], off)
    return float(chi2.sf(statistic, len(cells)))


def independence(draws: Draws, position: int, pairs: Sequence[tuple[int, int]]) -> float:
    """How probable tokens are that go together as much as in these pairs of responses.

    Those drawn with the same random number are the same far too often. The product of two draws'
    differences from their laws has mean zero if they are independent.
    """
    laws = draws.laws[:, position]
    first, other = np.array(pairs).T
    off = np.eye(laws.shape[-1])[draws.tokens[:, position]] - laws
    p, q = laws[first], laws[other]
    together = (off[first] * off[other]).sum()
    # The trace of the product of two covariances diag(p) - p p', q likewise.
    variance = (p * q - p * p * q - p * q * q).sum() + ((p * q).sum(-1) ** 2).sum()
    return float(2 * norm.sf(abs(together) / np.sqrt(variance)))

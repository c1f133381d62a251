"""Which experts a step's tokens go to: how many are hot, and what falls to the busiest rank. Pure.

A token goes to `per_token` of a layer's experts. Which ones it takes does not depend on the other
tokens: each expert has a popularity, the probability that a token goes to it. They are equal, or
fall as a power of the expert's place among them (Zipf's law, of exponent `skew`).

Where experts lie whole on the ranks, popular ones lie on any of them, others in each layer. What
the busiest rank has is the mean over layers drawn at random, always the same ones; how much work
falls to a rank is normally distributed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pat_vllm.predictor.state import Floats

_LAYERS = 64
"""Drawn layers. The mean of the busiest rank's share is known to about a percent."""


@dataclass(frozen=True)
class Routing:
    """How tokens choose among a layer's experts.

    Attributes:
        count: experts.
        per_token: those that a token goes to.
        skew: exponent of their popularity; 0: all are equal.
    """

    count: int
    per_token: int
    skew: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"a token goes to 1 to {self.count} experts, not to {self.per_token}")
        if not 0 <= self.skew < np.inf:
            raise ValueError(f"skew of routing is at least 0, got {self.skew}")

    def popularity(self) -> Floats:
        """Probability that a token goes to an expert, float64 [count], descending."""
        return _popularity(self)

    def hot(self, tokens: float) -> float:
        """Experts of a layer that at least one of so many tokens goes to, in the mean."""
        return float((1 - (1 - self.popularity()) ** tokens).sum())

    def busiest(self, tokens: int, ranks: int) -> ExpertLoad:
        """What falls to the rank with most, where the experts are spread, in the mean."""
        return _busiest(self, tokens, ranks)


@dataclass(frozen=True)
class ExpertLoad:
    """Of one rank, in one layer.

    Attributes:
        hot: experts that some token goes to.
        work: pairs of a token and one of its experts.
    """

    hot: float
    work: float


@lru_cache(maxsize=64)
def _popularity(routing: Routing) -> Floats:
    count, per_token = routing.count, routing.per_token
    weights = np.arange(1.0, count + 1) ** -routing.skew
    if routing.skew == 0 or per_token == count:
        return np.full(count, per_token / count)

    def chosen(rate: float) -> Floats:
        # Experts come in at random times, those of more weight sooner; a token takes the first.
        return -np.expm1(-rate * weights)

    low, high = 0.0, 1.0
    while chosen(high).sum() < per_token:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if chosen(middle).sum() < per_token else (low, middle)
    return chosen(high)


@lru_cache(maxsize=64)
def _drawn(routing: Routing, ranks: int) -> tuple[Floats, Floats, tuple[int, ...]]:
    """Layers whose experts lie at random: their popularities, and a uniform number for each, which
    says how soon it is hot, float64 [layers, count]; the first expert of each rank."""
    random = np.random.default_rng((routing.count, routing.per_token))
    popularity = np.tile(routing.popularity(), (_LAYERS, 1))
    popularity, uniform = random.permuted(popularity, axis=1), random.random(popularity.shape)
    # Ranges, as vLLM lays them: the first ranks have one more where they do not divide.
    each, more = divmod(routing.count, ranks)
    return popularity, uniform, tuple(rank * each + min(rank, more) for rank in range(ranks))


@lru_cache(maxsize=4096)
def _busiest(routing: Routing, tokens: int, ranks: int) -> ExpertLoad:
    # The same random numbers for all token counts: with more tokens no rank has less.
    popularity, uniform, first = _drawn(routing, ranks)
    hot = np.add.reduceat(1.0 * (uniform > (1 - popularity) ** tokens), first, axis=1)
    mean, variance = (
        np.add.reduceat(one, first, axis=1) for one in (popularity, popularity * (1 - popularity))
    )
    random = np.random.default_rng((routing.count, routing.per_token, ranks))
    off = random.standard_normal(mean.shape) * np.sqrt(variance)
    off -= off.mean(axis=1, keepdims=True)  # every token goes to as many
    work = np.clip(tokens * mean + tokens**0.5 * off, 0.0, tokens * routing.per_token)
    return ExpertLoad(float(hot.max(axis=1).mean()), float(work.max(axis=1).mean()))

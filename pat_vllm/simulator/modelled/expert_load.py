"""Which experts a step's tokens go to: how many are hot, and what falls to the busiest rank. Pure.

A token goes to `per_token` of a layer's experts, which are equally popular, whatever the other
tokens take. Where experts lie whole on the ranks, what the busiest rank has is the mean over layers
drawn at random, always the same ones; how much work falls to a rank is normally distributed there.
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
    """

    count: int
    per_token: int

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"a token goes to 1 to {self.count} experts, not to {self.per_token}")

    @property
    def popularity(self) -> float:
        """Probability that a token goes to an expert."""
        return self.per_token / self.count

    def hot(self, tokens: float) -> float:
        """Experts of a layer that at least one of so many tokens goes to, in the mean."""
        return self.count * (1 - (1 - self.popularity) ** tokens)

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
def _drawn(routing: Routing, ranks: int) -> tuple[Floats, tuple[int, ...]]:
    """Drawn layers: a uniform number for each expert, which says how soon it is hot, float64
    [layers, count]; the first expert of each rank, and their count."""
    uniform = np.random.default_rng((routing.count, routing.per_token)).random(
        (_LAYERS, routing.count)
    )
    # Ranges, as vLLM lays them: the first ranks have one more where they do not divide.
    each, more = divmod(routing.count, ranks)
    return uniform, tuple(rank * each + min(rank, more) for rank in range(ranks + 1))


@lru_cache(maxsize=4096)
def _busiest(routing: Routing, tokens: int, ranks: int) -> ExpertLoad:
    # The same random numbers for all token counts: with more tokens no rank has less.
    uniform, first = _drawn(routing, ranks)
    share = routing.popularity
    hot = np.add.reduceat(1.0 * (uniform > (1 - share) ** tokens), first[:-1], axis=1)
    mean = np.diff(first) * share
    random = np.random.default_rng((routing.count, routing.per_token, ranks))
    off = random.standard_normal((_LAYERS, ranks)) * np.sqrt(mean * (1 - share))
    off -= off.mean(axis=1, keepdims=True)  # every token goes to as many
    work = np.clip(tokens * mean + tokens**0.5 * off, 0.0, tokens * routing.per_token)
    return ExpertLoad(float(hot.max(axis=1).mean()), float(work.max(axis=1).mean()))

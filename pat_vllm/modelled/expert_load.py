"""Which experts a step's tokens go to: how many are hot, and what falls to the busiest rank. Pure.

A token goes to `per_token` of a layer's experts, which are equally popular, whatever the other
tokens take. Where experts lie whole on the ranks, what the busiest rank has is the mean over layers
drawn at random, always the same ones; how much work falls to a rank is normally distributed there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pat_vllm.models.layer_sizes import ExpertSizes
from pat_vllm.predictor.state import Floats

_LAYERS = 64
"""Number of drawn layers: the mean of the busiest rank's share is known to about a percent."""


class ExpertLoad(NamedTuple):
    """What falls to one rank in one layer.

    Attributes:
        hot: number of experts that some token goes to.
        work: number of pairs of a token and one of its experts.
    """

    hot: float
    work: float


def hot_experts(experts: ExpertSizes, tokens: Floats) -> Floats:
    """Mean number of a layer's experts that at least one of so many tokens goes to."""
    return experts.count * (1 - (1 - experts.per_token / experts.count) ** tokens)


@lru_cache(maxsize=64)
def _drawn(experts: ExpertSizes, ranks: int) -> tuple[Floats, tuple[int, ...]]:
    """Drawn layers: a uniform number for each expert, which says how soon it is hot, float64
    [layers, count]; the first expert of each rank, and their count."""
    random = np.random.default_rng((experts.count, experts.per_token))
    uniform = random.random((_LAYERS, experts.count))
    # Ranges, as vLLM lays them: the first ranks have one more where they do not divide.
    each, more = divmod(experts.count, ranks)
    return uniform, tuple(rank * each + min(rank, more) for rank in range(ranks + 1))


@lru_cache(maxsize=4096)
def busiest(experts: ExpertSizes, tokens: int, ranks: int) -> ExpertLoad:
    """What falls to the rank with most, where whole experts are spread: the mean over layers."""
    # The same random numbers for all token counts: with more tokens no rank has less.
    uniform, first = _drawn(experts, ranks)
    share = experts.per_token / experts.count
    hot = np.add.reduceat(1.0 * (uniform > (1 - share) ** tokens), first[:-1], axis=1)
    mean = np.diff(first) * share
    random = np.random.default_rng((experts.count, experts.per_token, ranks))
    off = random.standard_normal((_LAYERS, ranks)) * np.sqrt(mean * (1 - share))
    off -= off.mean(axis=1, keepdims=True)  # every token goes to as many, so the sum is given
    work = np.clip(tokens * mean + tokens**0.5 * off, 0.0, tokens * experts.per_token)
    return ExpertLoad(float(hot.max(axis=1).mean()), float(work.max(axis=1).mean()))

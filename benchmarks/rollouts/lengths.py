"""How well lengths of responses are known from the epoch before, by prompt and without. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.rollouts.records import Response


@dataclass(frozen=True)
class LengthErrors:
    """Of an epoch's responses, whose lengths are guessed by those of the epoch before.

    Attributes:
        alike: mean absolute error, in octaves, of the median length of all.
        by_prompt: likewise, of the median length of the same prompt's responses.
        found: share of the longest tenth of the responses whose prompts were among the fifth of
            the prompts with the greatest mean length; 0.2 by chance.
    """

    alike: float
    by_prompt: float
    found: float


def length_errors(before: Sequence[Response], now: Sequence[Response]) -> LengthErrors:
    """Of two epochs with the same prompts, of at least one response each."""
    earlier: dict[int, list[int]] = {}
    for one in before:
        earlier.setdefault(one.prompt, []).append(len(one.tokens))
    lengths = np.array([len(one.tokens) for one in now])
    prompts = np.array([one.prompt for one in now])
    median_of_all = np.median([n for each in earlier.values() for n in each])
    medians = np.array([np.median(earlier[prompt]) for prompt in prompts])
    means = {prompt: float(np.mean(each)) for prompt, each in earlier.items()}
    long = sorted(means, key=means.__getitem__, reverse=True)[: max(1, len(means) // 5)]
    longest = np.argsort(-lengths, kind="stable")[: max(1, len(lengths) // 10)]
    return LengthErrors(
        float(abs(np.log2(lengths / median_of_all)).mean()),
        float(abs(np.log2(lengths / medians)).mean()),
        float(np.isin(prompts[longest], long).mean()),
    )

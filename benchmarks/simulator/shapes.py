"""Synthetic batches of response lengths. Pure.

A length equal to the trace's `max_tokens` is a response that ran into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.simulator.traces import LengthTrace
from pat_vllm.predictor.state import Ints


def lognormal(
    requests: int, median: float, sigma: float, max_tokens: int, seed: int = 0
) -> LengthTrace:
    """Log-normal lengths; `sigma` is the standard deviation of their logarithm."""
    random = np.random.default_rng(seed)
    drawn = median * np.exp(sigma * random.standard_normal(requests))
    return LengthTrace.batch("log-normal", drawn, max_tokens, seed)


def two_mode(
    requests: int,
    median: float = 1000,
    sigma: float = 0.6,
    long_share: float = 0.1,
    max_tokens: int = 16384,
    seed: int = 0,
) -> LengthTrace:
    """Like reasoning: log-normal ones, and a share that ends in the last third before `max_tokens`
    or runs into it (a tenth of that share)."""
    random = np.random.default_rng(seed)
    usual = median * np.exp(sigma * random.standard_normal(requests))
    late = max_tokens * random.uniform(2 / 3, 2 / 3 + 1 / 3 / 0.9, requests)
    drawn = np.where(random.random(requests) < long_share, late, usual)
    return LengthTrace.batch("two modes", drawn, max_tokens, seed)


def uniform(
    requests: int, low: int, high: int, max_tokens: int | None = None, seed: int = 0
) -> LengthTrace:
    """All lengths from `low` to `high` equally likely."""
    drawn = np.random.default_rng(seed).integers(low, high, requests, endpoint=True)
    return LengthTrace.batch("uniform", drawn, max_tokens or high, seed)


def straggler(
    requests: int, usual: int, longest: int, max_tokens: int | None = None, seed: int = 0
) -> LengthTrace:
    """All lengths within 5% of `usual` but one, at a random place, of `longest`."""
    random = np.random.default_rng(seed)
    drawn = usual * random.uniform(0.95, 1.05, requests)
    drawn[random.integers(requests)] = longest
    return LengthTrace.batch("straggler", drawn, max_tokens or max(usual, longest), seed)


def shifted(
    medians: Sequence[float], requests: int, sigma: float, max_tokens: int, seed: int = 0
) -> tuple[LengthTrace, ...]:
    """A log-normal batch for each of `medians`."""
    return tuple(
        replace(
            lognormal(requests, median, sigma, max_tokens, seed * 100_003 + number),
            name=f"median {median:g}",
        )
        for number, median in enumerate(medians)
    )


def grpo(
    prompts: int,
    samples: int,
    within_sigma: float,
    between_sigma: float,
    median: float = 1000,
    max_tokens: int = 16384,
    seed: int = 0,
) -> LengthTrace:
    """`samples` responses to each of `prompts` prompts, with correlated log-normal lengths.

    The intraclass correlation of log-lengths is between^2 / (between^2 + within^2).
    """
    random = np.random.default_rng(seed)
    groups: Ints = np.repeat(np.arange(prompts), samples)
    logs = between_sigma * random.standard_normal(prompts)[groups]
    logs += within_sigma * random.standard_normal(len(groups))
    return LengthTrace.batch("GRPO", median * np.exp(logs), max_tokens, seed, groups.tolist())


def deepscaler(requests: int = 128, max_tokens: int = 24576, seed: int = 0) -> LengthTrace:
    """Log-normal with median 1443 and sigma 1.406, after the shares PAT reports for DeepScaleR.

    These make 10.85% of responses longer than 8192 tokens and 2.19%, that is 2.8 of 128, reach
    24576: the unique log-normal distribution for which both are so.
    """
    batch = lognormal(requests, 1443.0, 1.406, max_tokens, seed)
    return replace(batch, name="DeepScaleR-like")

"""Response lengths of made-up batches, in tokens, for expected loads and for advice. Pure.

A length equal to `max_tokens` is a response that ran into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pat_vllm.predictor.state import Floats, Ints

_DEEPSCALER = 1443.0, 1.406
"""Median in tokens and sigma of the only log-normal distribution of which 10.85% is longer than
8192 tokens and 2.19%, that is 2.8 of 128, than 24576, as the PAT paper reports of DeepScaleR."""


_RL_TRACES = {
    0.0: 16,
    0.5: 654,
    0.8: 10000,
    0.9: 22000,
    0.95: 33212,
    0.99: 57067,
    1.0: 65489,
}
"""Tokens by quantile, as published of rl-traces-bench; the shortest is an assumption."""


def _rl_traces(random: np.random.Generator, count: int, most: int) -> Floats:
    """Between the quantiles that are known, logarithms are uniform."""
    logs = np.log([*_RL_TRACES.values()])
    return np.exp(np.interp(random.random(count), [*_RL_TRACES], logs))


def _lognormal(random: np.random.Generator, count: int, median: float, sigma: float) -> Floats:
    return median * np.exp(sigma * random.standard_normal(count))


def _two_mode(random: np.random.Generator, count: int, most: int) -> Floats:
    """Lengths as of reasoning: log-normal, but for a tenth, which ends in the last third before
    `most` or runs into it."""
    usual = _lognormal(random, count, most / 16, 0.6)
    late = most * random.uniform(2 / 3, 2 / 3 + 1 / 3 / 0.9, count)
    return np.where(random.random(count) < 0.1, late, usual)


def _between(random: np.random.Generator, count: int, least: int, most: int) -> Floats:
    return random.integers(least, most, count, endpoint=True).astype(np.float64)


def _straggler(random: np.random.Generator, count: int, most: int) -> Floats:
    """All are within 5% of a sixteenth of `most` but one, at a random place, which has `most`."""
    drawn = max(1, most // 16) * random.uniform(0.95, 1.05, count)
    drawn[random.integers(count)] = most
    return drawn


def _grpo(random: np.random.Generator, count: int, most: int) -> Floats:
    """Eight responses to each prompt, which are alike."""
    between = random.standard_normal(-(-count // 8)).repeat(8)[:count]
    return most / 16 * np.exp(between + 0.6 * random.standard_normal(count))


_SHAPES: Mapping[str, Callable[[np.random.Generator, int, int], Floats]] = {
    "deepscaler": lambda random, count, most: _lognormal(random, count, *_DEEPSCALER),
    "log-normal": lambda random, count, most: _lognormal(random, count, most / 16, 1.2),
    "two-mode": _two_mode,
    "alike": lambda random, count, most: _between(random, count, most // 17 + 1, most // 16 + 1),
    "uniform": lambda random, count, most: _between(random, count, 1, most),
    "straggler": _straggler,
    "grpo": _grpo,
    "rl-traces": _rl_traces,
}
SHAPES = tuple(_SHAPES)


def drawn_lengths(shape: str, count: int, max_tokens: int, seed: int) -> Ints:
    """Lengths of a batch of one of `SHAPES`, 1 to `max_tokens`, int64 [count]."""
    drawn = _SHAPES[shape](np.random.default_rng(seed), count, max_tokens)
    return np.clip(np.rint(drawn), 1, max_tokens).astype(np.int64)

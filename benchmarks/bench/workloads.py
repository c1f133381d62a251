"""The benchmark's workloads: what responses of reinforcement learning look like, scaled down. Pure.

Each makes a trace per repeat: other lengths from the same distribution, the same for all sides.
Their sizes put a batch at 5 to 15 seconds on two cores, and its live requests on both sides of the
number at which one layout overtakes the other there.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.simulator import shapes
from benchmarks.simulator.traces import LengthTrace

MAX_TOKENS = 320
"""Longest response of any workload, tokens. The predictor is told it for all of them."""
PROMPT_TOKENS = (8, 32)
"""Shortest and longest prompt: responses are what this measures."""

# Shape of DeepScaleR's lengths, as `shapes.deepscaler` has it, in units of max_tokens.
_MEDIAN = 1443 / 24576
_SIGMA = 1.406


@dataclass(frozen=True)
class Workload:
    """A kind of batch.

    Attributes:
        text: one line about it.
        make: trace of (repeat, factor on sizes, seed).
    """

    name: str
    text: str
    make: Callable[[int, float, int], LengthTrace]

    def trace(self, repeat: int, scale: float = 1.0, seed: int = 0) -> LengthTrace:
        """The batch of a repeat; 0 is the first, from which engines warm up and lengths are learnt.

        Args:
            scale: factor on the number of requests and their lengths.
        """
        own = zlib.crc32(f"{self.name} {seed} {repeat}".encode())
        trace = self.make(repeat, scale, own)
        prompts = np.random.default_rng((own, 3)).integers(
            *PROMPT_TOKENS, size=len(trace), endpoint=True
        )
        return replace(
            trace,
            name=self.name,
            num_prompt_tokens=tuple(int(tokens) for tokens in prompts),
            max_tokens=max(1, round(MAX_TOKENS * scale)),
        )


def _count(requests: int, scale: float) -> int:
    return max(2, round(requests * scale))


def _lognormal(repeat: int, scale: float, seed: int) -> LengthTrace:
    longest = MAX_TOKENS * scale
    return shapes.lognormal(_count(128, scale), longest * _MEDIAN, _SIGMA, round(longest), seed)


def _two_mode(repeat: int, scale: float, seed: int) -> LengthTrace:
    longest = MAX_TOKENS * scale
    return shapes.two_mode(
        _count(64, scale), median=24 * scale, sigma=0.6, long_share=0.09, max_tokens=round(longest),
        seed=seed,
    )  # fmt: skip


def _uniform(requests: int, low: int, high: int) -> Callable[[int, float, int], LengthTrace]:
    def make(repeat: int, scale: float, seed: int) -> LengthTrace:
        least, most = max(1, round(low * scale)), max(2, round(high * scale))
        return shapes.uniform(_count(requests, scale), least, most, seed=seed)

    return make


def _straggler(repeat: int, scale: float, seed: int) -> LengthTrace:
    usual = max(1, round(24 * scale))
    return shapes.straggler(_count(33, scale), usual, 8 * usual, seed=seed)


def _staggered(repeat: int, scale: float, seed: int) -> LengthTrace:
    count = _count(40, scale)
    batch = shapes.lognormal(count, 48 * scale, 0.7, round(MAX_TOKENS * scale), seed)
    # Bursts that come, in the mean, when the ones before are about half done.
    random = np.random.default_rng((seed, 2))
    arrivals: list[float] = []
    now = 0.0
    while len(arrivals) < count:
        arrivals += [now] * max(1, round(scale * int(random.integers(4, 12, endpoint=True))))
        now += float(random.exponential(1.2 * scale))
    return replace(batch, arrivals=tuple(arrivals[:count]))


def _shift(repeat: int, scale: float, seed: int) -> LengthTrace:
    # Two alike, then two of the other kind: right after a change, and once it was learnt.
    median = (16, 48)[repeat // 2 % 2]
    return shapes.lognormal(_count(64, scale), median * scale, 0.8, round(MAX_TOKENS * scale), seed)


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            "lognormal",
            "128 requests, log-normal with the shape of DeepScaleR: 11% above a third of "
            f"max_tokens ({MAX_TOKENS}), 2% at it",
            _lognormal,
        ),
        Workload(
            "two_mode",
            "64 requests like reasoning: most around 24 tokens, 9% in the last third before the "
            "max_tokens or at it",
            _two_mode,
        ),
        Workload("uniform_short", "128 requests of 16 to 32 tokens", _uniform(128, 16, 32)),
        Workload("uniform_long", "20 requests of 100 to 125 tokens", _uniform(20, 100, 125)),
        Workload("straggler", "32 requests of about 24 tokens and one of 192", _straggler),
        Workload(
            "staggered",
            "40 log-normal requests around 48 tokens, in bursts of 4 to 12 that arrive over some "
            "seconds",
            _staggered,
        ),
        Workload(
            "shift",
            "64 log-normal requests; their median is 16 or 48 tokens and changes every second "
            "batch",
            _shift,
        ),
    )
}

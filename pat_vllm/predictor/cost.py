"""What a switch costs, and what carrying one request through it costs. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.state import Floats
from pat_vllm.profiling.profile import Profile, SwitchSample
from pat_vllm.reporting import SwitchReport

Number = TypeVar("Number", float, Floats)

_SMOOTHING = 0.5
"""Weight of the newest measurement in the running averages."""
_MAX_CORRECTION = 20.0
"""Most that past switches may correct the profile's costs, as a factor either way."""


@dataclass(frozen=True)
class TransferCost:
    """Analytic cost of the two ways to carry a request's KV.

    migrate   = tokens * kv_bytes_per_token / bandwidth
    recompute = tokens / prefill_rate

    Both are linear in the tokens, as measured rates are averages over tokens; the fixed cost of a
    switch is paid either way and does not enter the comparison.

    Attributes:
        kv_bytes_per_token: KV bytes of one token over all layers and KV heads.
        bandwidth: bytes per second that an exchange moves.
        prefill_rate: tokens per second that a replica of the target layout prefills, by tp.
    """

    kv_bytes_per_token: int
    bandwidth: float
    prefill_rate: dict[int, float]

    def migrate_seconds(self, tokens: int) -> float:
        """Seconds to move the KV of `tokens` tokens."""
        return tokens * self.kv_bytes_per_token / self.bandwidth

    def recompute_seconds(self, tokens: int, tp: int) -> float:
        """Seconds to prefill `tokens` tokens again in the target layout."""
        return tokens / self.prefill_rate[tp]

    def cheaper(self, tokens: int, tp: int) -> Literal["migrate", "recompute"]:
        """The cheaper way for a request with `tokens` computed tokens."""
        migrate = self.migrate_seconds(tokens)
        return "migrate" if migrate <= self.recompute_seconds(tokens, tp) else "recompute"

    def with_exchange(self, num_bytes: int, seconds: float) -> TransferCost:
        """The model after an exchange that moved `num_bytes` in `seconds`."""
        if num_bytes <= 0 or seconds <= 0:
            return self
        bandwidth = self.bandwidth + _SMOOTHING * (num_bytes / seconds - self.bandwidth)
        return replace(self, bandwidth=bandwidth)


@dataclass(frozen=True)
class _Linear:
    """Seconds of a switch between two layouts, linear in the live requests and their tokens."""

    fixed: float
    per_request: float
    per_token: float

    def seconds(self, live: Number, tokens: Number) -> Number:
        return self.fixed + self.per_request * live + self.per_token * tokens


class CostModel:
    """Seconds that a switch takes away from generation.

    quiesce + plan + reshard + hand-over + migrate or recompute each request, which is linear in
    the requests and their tokens for each pair of layouts. The coefficients come from a profile's
    switches; past switches of this engine correct them by a factor per pair.
    """

    def __init__(
        self,
        samples: tuple[SwitchSample, ...],
        recompute_per_token: dict[int, float] | None = None,
    ) -> None:
        """Fit.

        Args:
            samples: measured or modelled switches; a pair without any takes the most expensive
                coefficients of the others, and is free when there are none at all.
            recompute_per_token: seconds to prefill a token again in a layout, by tp; None where
                KV is always migrated.
        """
        self._recompute = recompute_per_token or {}
        by_pair: dict[tuple[int, int], list[SwitchSample]] = defaultdict(list)
        for sample in samples:
            by_pair[sample.source, sample.target].append(sample)
        self._linear = {pair: _fit(of_pair) for pair, of_pair in by_pair.items()}
        known = self._linear.values()
        self._unknown = _Linear(
            max((one.fixed for one in known), default=0.0),
            max((one.per_request for one in known), default=0.0),
            max((one.per_token for one in known), default=0.0),
        )
        self._log_correction: dict[tuple[int, int], float] = {}

    @classmethod
    def of(cls, profile: Profile, kv_transfer: str = "auto") -> CostModel:
        """The model of a profile's engine."""
        rates: dict[int, float] = {}
        for sample in profile.steps:
            if not sample.batch and sample.prefill and sample.busy == profile.ranks // sample.tp:
                rate = sample.prefill / sample.seconds * sample.busy
                rates[sample.tp] = max(rate, rates.get(sample.tp, 0.0))
        recompute = {tp: 1 / rate for tp, rate in rates.items()}
        return cls(profile.switches, None if kv_transfer == "migrate" else recompute)

    def seconds(self, source: Layout, target: Layout, live: Number, tokens: Number) -> Number:
        """The stall of a switch with `live` requests of `tokens` tokens of context together."""
        pair = (source.tp, target.tp)
        linear = self._linear.get(pair, self._unknown)
        correction = math.exp(self._log_correction.get(pair, 0.0))
        recompute = self._recompute.get(target.tp, math.inf)
        # Each request takes the cheaper way, and both ways are linear in its tokens.
        carried = min(correction * linear.per_token, recompute) * tokens
        return correction * (linear.fixed + linear.per_request * live) + carried

    def observe(self, report: SwitchReport) -> None:
        """Learn from a switch.

        The steps in flight that it let finish are no cost: they produced tokens.
        """
        if report.recomputed or not report.num_seqs:
            return  # part of the price is paid later, or nothing was moved at all
        pair = (report.source.tp, report.target.tp)
        linear = self._linear.get(pair, self._unknown)
        predicted = linear.seconds(report.num_seqs, report.tokens)
        real = report.seconds - report.quiesce
        if predicted <= 0 or real <= 0:
            return
        limit = math.log(_MAX_CORRECTION)
        ratio = min(limit, max(-limit, math.log(real / predicted)))
        old = self._log_correction.get(pair)
        self._log_correction[pair] = ratio if old is None else old + _SMOOTHING * (ratio - old)


def _fit(samples: list[SwitchSample]) -> _Linear:
    """Least squares of the relative error; coefficients are never negative."""
    from scipy.optimize import nnls

    features = np.array([[1.0, s.num_seqs, s.tokens] for s in samples])
    seconds = np.array([s.seconds for s in samples])
    # Columns differ by orders of magnitude.
    scale = np.maximum(features.max(axis=0), 1.0)
    coefficients, _ = nnls(features / seconds[:, None] / scale, np.ones(len(samples)))
    fixed, per_request, per_token = coefficients / scale
    return _Linear(float(fixed), float(per_request), float(per_token))

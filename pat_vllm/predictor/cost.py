"""What carrying a request through a switch costs: migrate its KV, or prefill it again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

_SMOOTHING = 0.5
"""Weight of the newest measurement in the running averages."""


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

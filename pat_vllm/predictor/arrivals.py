"""Whether more requests are to be expected soon. Pure."""

from __future__ import annotations

from collections import deque

from pat_vllm.predictor.policy import SETTLE_SECONDS

_BURSTS = 16
"""Bursts that are remembered."""
_SILENCE = 3.0
"""After this many mean gaps without a burst, no more are expected."""


class Arrivals:
    """Requests come in bursts: a batch is one, staggered traffic is many.

    The mean gap between the starts of the last bursts says when the next one is due. A single
    burst, as in synchronous RLHF, gives no reason to expect another.
    """

    def __init__(self) -> None:
        self._starts: deque[float] = deque(maxlen=_BURSTS)
        self._sizes: deque[int] = deque(maxlen=_BURSTS)
        self._last = float("-inf")

    def arrived(self, now: float) -> None:
        """A request has arrived."""
        if not self._starts or now - self._last > SETTLE_SECONDS:
            self._starts.append(now)
            self._sizes.append(0)
        self._sizes[-1] += 1
        self._last = now

    def forget(self) -> None:
        """The engine is idle: what comes next is another batch."""
        self._starts.clear()
        self._sizes.clear()

    def gap(self, now: float) -> float:
        """Mean seconds between bursts, or infinity when none is expected."""
        if len(self._starts) < 2:
            return float("inf")
        mean = (self._starts[-1] - self._starts[0]) / (len(self._starts) - 1)
        return mean if now - self._starts[-1] <= _SILENCE * mean else float("inf")

    @property
    def size(self) -> float:
        """Mean requests of a burst."""
        return sum(self._sizes) / len(self._sizes) if self._sizes else 0.0

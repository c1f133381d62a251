"""Learns online by what factor real steps differ from the predicted ones. Pure Python.

The logarithm of real over predicted time is the sum of two parts: of the machine, and of the
tensor-parallel size. What the first steps in a layout show is the error of its profile; what
surprises later is the machine, for that changes and a profile's error does not. So a slow machine
also slows the layouts that are not in use, and a layout whose profile is wrong does not spoil the
others.
"""

from __future__ import annotations

from math import exp, log
from statistics import median

LIMIT = log(8.0)
"""Corrections stay within a factor of 8 either way."""

VERSION_STEP = log(1.03)
"""Change of a correction from which on it counts as another."""

_MACHINE, _SIZE = 1 / 8, 1 / 50
"""Shares of a surprise that machine and size take once the size is known."""

_KNOWN = 8
"""Steps of a size whose mean makes it known."""

_DOUBT = 1.5
"""Steps that the first one counts against, for it may be an outlier."""

_CLIP = 0.5
"""Most that counts of a surprise: more is mostly an outlier."""


class OnlineCorrection:
    """The factors real / predicted, by tensor-parallel size.

    Attributes:
        version: grows whenever a correction has changed by more than ~3 % since it last did.
        observed: steps observed.
    """

    def __init__(self) -> None:
        self.version = 0
        self.observed = 0
        self._machine = 0.0
        self._sizes: dict[int, tuple[float, int]] = {}
        """The part of each size, and its steps."""
        self._announced: dict[int, float] = {}

    def factor(self, tp: int) -> float:
        """Real over predicted time. A size without steps is as far off as most others are."""
        return exp(min(max(self._log(tp), -LIMIT), LIMIT))

    def evidence(self, tp: int) -> int:
        """Steps observed."""
        return self._sizes.get(tp, (0.0, 0))[1]

    def observe(self, tp: int, ratio: float) -> None:
        """Learn from a decode step that took `ratio` times what was predicted uncorrected."""
        part, count = self._sizes.get(tp, (self._log(tp) - self._machine, 0))
        surprise = min(max(log(ratio), -LIMIT), LIMIT) - self._machine - part
        surprise = min(max(surprise, -_CLIP), _CLIP)
        if count < _KNOWN:
            part += surprise / (count + _DOUBT)
        else:
            self._machine += _MACHINE * surprise
            part += _SIZE * surprise
        self._sizes[tp] = (part, count + 1)
        self.observed += 1
        now = {one: self._log(one) for one in self._sizes}
        if any(abs(at - self._announced.get(one, 0.0)) > VERSION_STEP for one, at in now.items()):
            self.version += 1
            self._announced = now

    def _log(self, tp: int) -> float:
        if tp in self._sizes:
            return self._machine + self._sizes[tp][0]
        parts = [part for part, _ in self._sizes.values()]
        return self._machine + (median(parts) if parts else 0.0)

"""Survival of responses by length, from ended and from cut short or running ones. Pure.

The estimator is Kaplan and Meier's (1958) on a geometric grid of lengths. In each bin the hazard
per token is (responses that ended there) / (tokens generated there, the last ones included), which
is the maximum likelihood estimate; where a bin is one token wide this is Kaplan-Meier exactly.
A response that was cut short, or still runs, counts its tokens but no end, so it biases nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

import numpy as np

from pat_vllm.predictor.state import Bools, Floats, Ints

_SINGLE = 16
"""Up to this length each length has its own bin."""

_PER_OCTAVE = 8
"""Bins per doubling above: each spans 9%. 2^17 tokens take 120 bins."""

_SHAPES = (1.0, 1.5, 2.0, 3.0)
"""Shapes of the prior: standard deviations of the log-length of 1.8, 1.2, 0.9 and 0.6."""

_OCTAVES = 1.5
"""Standard deviation of the prior's log2-median."""

_DOUBT = 0.25
"""Share of the pseudo-responses that stays as it was before data: what has been seen need not
continue (a second mode of long responses)."""

_LOWEST_SURVIVAL = 1e-12
"""Of one token, so that cumulative hazards stay finite."""


@cache
def edges(limit: int) -> Floats:
    """Bin edges 0, 1, 2, ... of which the last is at least `limit`, float64 [bins + 1].

    Bin b holds the lengths above edge b up to edge b + 1. A longer grid continues a shorter one.
    """
    values = list(range(_SINGLE + 1))
    step = 0
    while values[-1] < limit:
        step += 1
        values.append(round(_SINGLE * 2 ** (step / _PER_OCTAVE)))
    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array


@dataclass(frozen=True)
class Pool:
    """What a set of responses says about the hazard, possibly weighted.

    Attributes:
        ends: responses that ended, float64 [bins].
        tokens: tokens that responses generated, the last ones included, float64 [bins].
    """

    ends: Floats
    tokens: Floats

    @classmethod
    def empty(cls, bins: int) -> Pool:
        """Nothing seen."""
        return cls(np.zeros(bins), np.zeros(bins))

    @classmethod
    def of(cls, lengths: Ints, ended: Bools, limit: int) -> Pool:
        """Responses of these lengths, on the grid for `limit`; not `ended` ones are censored."""
        collected = Collector(limit)
        collected.add_many(lengths, ended)
        return collected.pool()

    def __add__(self, other: Pool) -> Pool:
        return Pool(self.ends + other.ends, self.tokens + other.tokens)

    def __mul__(self, weight: float) -> Pool:
        return Pool(self.ends * weight, self.tokens * weight)

    def extended(self, bins: int) -> Pool:
        """The same on a grid of at least `bins` bins."""
        more = (0, max(0, bins - len(self.ends)))
        return Pool(np.pad(self.ends, more), np.pad(self.tokens, more))


class Collector:
    """Counts responses into a pool: constant time for each, and constant memory."""

    def __init__(self, limit: int) -> None:
        self.edges = edges(limit)
        self._edges = self.edges.astype(int).tolist()
        bins = len(self._edges) - 1
        self._ends = np.zeros(bins)
        self._stops = np.zeros(bins)
        self._partial = np.zeros(bins)

    def extend(self, limit: int) -> None:
        """Make room for lengths up to `limit`."""
        self.edges = edges(limit)
        self._edges = self.edges.astype(int).tolist()
        more = (0, len(self._edges) - 1 - len(self._ends))
        self._ends = np.pad(self._ends, more)
        self._stops = np.pad(self._stops, more)
        self._partial = np.pad(self._partial, more)

    def add(self, length: int, ended: bool) -> None:
        """A response of at least one token."""
        at = bisect_left(self._edges, length) - 1
        self._stops[at] += 1
        self._partial[at] += length - self._edges[at]
        if ended:
            self._ends[at] += 1

    def add_many(self, lengths: Ints, ended: Bools) -> None:
        """Responses of any lengths, 0 included."""
        bins = len(self._ends)
        at = np.maximum(np.searchsorted(self.edges, lengths) - 1, 0)
        self._stops += np.bincount(at, minlength=bins)
        self._partial += np.bincount(at, weights=lengths - self.edges[at], minlength=bins)
        if ended.any():
            self._ends += np.bincount(at[ended], minlength=bins)

    def pool(self) -> Pool:
        """All responses added."""
        beyond = self._stops[::-1].cumsum()[::-1] - self._stops
        return Pool(self._ends.copy(), beyond * np.diff(self.edges) + self._partial)


class Prior:
    """A few pseudo-responses of a heavy-tailed distribution, which fill what was not seen.

    They are log-logistic, S(l) = 1 / (1 + (l / median)^shape). With shape 1 the median remaining
    length after l tokens is median + l: what has run long will run about as long again. Medians
    and shapes are averaged by their likelihood, so as soon as something has ended, the unseen
    tail continues what was seen.

    Args:
        limit: of the grid.
        median: expected without data, in tokens.
        weight: number of pseudo-responses.
    """

    def __init__(self, limit: int, median: float, weight: float) -> None:
        grid = edges(limit)
        octaves = np.arange(-8.0, 3.5, 0.5)
        scale = np.repeat(np.maximum(median * 2**octaves, 1), len(_SHAPES))[:, None]
        shape = np.tile(_SHAPES, len(octaves))[:, None]
        log_survival = -np.log1p((grid / scale) ** shape)
        steps = np.diff(log_survival, axis=1)
        self._log_stay = steps / np.diff(grid)
        per_token = -np.expm1(self._log_stay)
        self._log_end = np.log(per_token)
        self._ends = -weight * np.exp(log_survival[:, :-1]) * np.expm1(steps)
        self._tokens = self._ends / per_token
        belief = -0.5 * (octaves / _OCTAVES) ** 2
        self._belief = np.repeat(belief, len(_SHAPES))
        self._unseen = np.exp(self._belief) / np.exp(self._belief).sum()

    def given(self, pool: Pool) -> Pool:
        """The pseudo-responses after `pool` was seen."""
        log = self._belief + self._log_end @ pool.ends + self._log_stay @ (pool.tokens - pool.ends)
        share = np.exp(log - log.max())
        share = (1 - _DOUBT) * share / share.sum() + _DOUBT * self._unseen
        return Pool(share @ self._ends, share @ self._tokens)


def cumulative_hazard(pool: Pool, limit: int) -> Floats:
    """H = -log S at the edges of the grid for `limit`, float64 [bins + 1]; linear in between."""
    grid = edges(limit)
    per_token = pool.ends / np.maximum(pool.tokens, 1e-300)
    per_token = np.minimum(per_token, 1 - _LOWEST_SURVIVAL)
    hazard = np.zeros(len(grid))
    np.cumsum(-np.log1p(-per_token) * np.diff(grid), out=hazard[1:])
    return hazard

"""Survival of responses by length, from ended and from cut short or running ones. Pure.

The estimator is Kaplan and Meier's (1958) on a geometric grid of lengths. In each bin the hazard
per token is (responses that ended there) / (tokens generated there, the last ones included), which
is the maximum likelihood estimate; where a bin is one token wide this is Kaplan-Meier exactly.
A response that was cut short, or still runs, counts its tokens but no end, so it biases nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from pat_vllm.predictor.state import Bools, Floats, Ints

Counts = Floats | Ints

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


_OCTAVES_OF_BINS = 18
"""So the grid ends at 2^22 tokens. Longer responses count as that long."""

EDGES: Floats = np.append(
    np.arange(_SINGLE),
    np.round(_SINGLE * 2 ** (np.arange(_OCTAVES_OF_BINS * _PER_OCTAVE + 1) / _PER_OCTAVE)),
)
"""Bin edges 0, 1, 2, ...: bin b holds the lengths above edge b up to edge b + 1."""

BINS = len(EDGES) - 1
_EDGES: list[int] = EDGES.astype(int).tolist()


@dataclass(frozen=True)
class Pool:
    """What a set of responses says about the hazard, possibly weighted.

    Attributes:
        ends: responses that ended, float64 [BINS].
        tokens: tokens that responses generated, the last ones included, float64 [BINS].
    """

    ends: Floats
    tokens: Floats

    @classmethod
    def empty(cls) -> Pool:
        """Nothing seen."""
        return cls(np.zeros(BINS), np.zeros(BINS))

    @classmethod
    def of(cls, lengths: Ints, ended: Bools) -> Pool:
        """Responses of these lengths, 0 included; not `ended` ones are censored."""
        lengths = np.minimum(lengths, EDGES[-1])
        at = np.maximum(np.searchsorted(EDGES, lengths) - 1, 0)
        partial = np.bincount(at, weights=lengths - EDGES[at], minlength=BINS)
        return cls._of_counts(
            np.bincount(at[ended], minlength=BINS), np.bincount(at, minlength=BINS), partial
        )

    @classmethod
    def _of_counts(cls, ends: Counts, stops: Counts, partial: Counts) -> Pool:
        """From responses that ended, and that ended or not, and their tokens in the last bin."""
        beyond = stops[::-1].cumsum()[::-1] - stops
        return cls(ends.astype(np.float64), beyond * np.diff(EDGES) + partial)

    def __add__(self, other: Pool) -> Pool:
        return Pool(self.ends + other.ends, self.tokens + other.tokens)

    def __mul__(self, weight: float) -> Pool:
        return Pool(self.ends * weight, self.tokens * weight)


class Collector:
    """Counts responses into a pool: constant time for each, and constant memory."""

    def __init__(self) -> None:
        self._ends, self._stops, self._partial = np.zeros((3, BINS))

    def add(self, length: int, ended: bool) -> None:
        """A response of at least one token."""
        length = min(length, _EDGES[-1])
        at = bisect_left(_EDGES, length) - 1
        self._stops[at] += 1
        self._partial[at] += length - _EDGES[at]
        if ended:
            self._ends[at] += 1

    def pool(self) -> Pool:
        """All responses added."""
        return Pool._of_counts(self._ends, self._stops, self._partial)


class Prior:
    """A few pseudo-responses of a heavy-tailed distribution, which fill what was not seen.

    They are log-logistic, S(l) = 1 / (1 + (l / median)^shape). With shape 1 the median remaining
    length after l tokens is median + l: what has run long will run about as long again. Medians
    and shapes are averaged by their likelihood, so as soon as something has ended, the unseen
    tail continues what was seen.

    Args:
        median: expected without data, in tokens.
        weight: number of pseudo-responses.
    """

    def __init__(self, median: float, weight: float) -> None:
        octaves = np.arange(-8.0, 3.5, 0.5)
        scale = np.repeat(np.maximum(median * 2**octaves, 1), len(_SHAPES))[:, None]
        shape = np.tile(_SHAPES, len(octaves))[:, None]
        log_survival = -np.log1p((EDGES / scale) ** shape)
        steps = np.diff(log_survival, axis=1)
        self._log_stay = steps / np.diff(EDGES)
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


def cumulative_hazard(pool: Pool) -> Floats:
    """H = -log S at `EDGES`, float64 [BINS + 1]; linear in between."""
    per_token = pool.ends / np.maximum(pool.tokens, 1e-300)
    per_token = np.minimum(per_token, 1 - _LOWEST_SURVIVAL)
    return np.append(0.0, np.cumsum(-np.log1p(-per_token) * np.diff(EDGES)))

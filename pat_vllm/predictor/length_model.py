"""Predicts how many tokens the running responses still have to generate. Pure.

The survival of responses by length is estimated from ended ones and from ones cut short or running:
by Kaplan and Meier's estimator (1958) on a geometric grid of lengths. In each bin the hazard per
token is (responses that ended there) / (tokens generated there, the last ones included), which is
the maximum likelihood estimate; where a bin is one token wide this is Kaplan-Meier exactly. A
response that was cut short, or still runs, counts its tokens but no end, so it biases nothing.
"""

from __future__ import annotations

import numpy as np

from pat_vllm.predictor.state import Bools, Floats, Ints, LiveRequests

_SINGLE = 16
"""Up to this length each length has its own bin."""
_PER_OCTAVE = 32
"""Bins per doubling above: each spans 2%. In wider ones, lengths at which many responses end are
mixed with lengths at which none does."""
_SHAPES = {1.0: 1.0, 1.5: 1.0, 2.0: 1.0, 3.0: 1.0, 6.0: 0.05, 12.0: 0.05, 24.0: 0.05}
"""Shapes of the prior, by how likely they are before data: standard deviations of the log-length of
1.8, 1.2, 0.9, 0.6, 0.3, 0.15 and 0.08. Without the narrow ones a batch of lengths alike would
always seem to have a long tail."""
_OCTAVES = 1.5
"""Standard deviation of the prior's log2-median."""
_DOUBT = 0.25
"""Share of the pseudo-responses that stays as it was before data: what has been seen need not
continue (a second mode of long responses)."""
_LOWEST_SURVIVAL = 1e-12
"""Of one token, so that cumulative hazards stay finite."""
_OCTAVES_OF_BINS = 18
"""So the grid ends at 2^22 tokens. Longer responses count as that long."""
EDGES: Floats = np.unique(
    np.append(
        np.arange(_SINGLE),
        np.round(_SINGLE * 2 ** (np.arange(_OCTAVES_OF_BINS * _PER_OCTAVE + 1) / _PER_OCTAVE)),
    )
)
"""Bin edges 0, 1, 2, ...: bin b holds the lengths above edge b up to edge b + 1."""
BINS = len(EDGES) - 1

_DISCOUNT = 0.8
"""Weight of a batch after each later one: about 5 batches count."""
_PRIOR_WEIGHT = 4.0
"""Pseudo-responses of the prior."""
_PRIOR_MEDIAN = 1 / 8
"""Median of the prior, as a share of the bound."""
_AT_ONCE = 4096
"""Responses that have stopped and are pooled together, at most: memory stays bounded."""
_SEED = 0
"""Of the sampled futures."""


def pool_of(lengths: Ints, ended: Bools) -> Floats:
    """What responses of these lengths, 0 included, say about the hazard; not `ended` ones are
    censored. Pools may be added, and weighted.

    Returns:
        Responses that ended, and tokens that responses generated, the last ones included, float64
        [2, BINS].
    """
    lengths = np.minimum(lengths, EDGES[-1])
    at = np.maximum(np.searchsorted(EDGES, lengths) - 1, 0)
    partial = np.bincount(at, weights=lengths - EDGES[at], minlength=BINS)
    ends, stops = np.bincount(at[ended], minlength=BINS), np.bincount(at, minlength=BINS)
    beyond = stops[::-1].cumsum()[::-1] - stops
    return np.array([ends, beyond * np.diff(EDGES) + partial])


class Prior:
    """A few pseudo-responses of a heavy-tailed distribution, which fill what was not seen.

    They are log-logistic, S(l) = 1 / (1 + (l / median)^shape). With shape 1 the median remaining
    length after l tokens is median + l: what has run long will run about as long again. Medians
    and shapes are averaged by their likelihood, so as soon as something has ended, the unseen
    tail continues what was seen.

    Args:
        median: of a response before data, tokens.
        edges: the first of `EDGES`; they bound the bins of the pools given to it.
    """

    def __init__(self, median: float, edges: Floats) -> None:
        # Narrow shapes need closer medians.
        medians = [np.arange(-8.0, 3.5, min(0.5, 3 / shape)) for shape in _SHAPES]
        counts = [len(of_shape) for of_shape in medians]
        octaves, shape = np.concatenate(medians), np.repeat([*_SHAPES], counts)[:, None]
        scale = np.maximum(median * 2**octaves, 1)[:, None]
        with np.errstate(divide="ignore"):  # of length 0
            log_survival = -np.logaddexp(0.0, shape * np.log(edges / scale))
        steps = np.diff(log_survival, axis=1)
        self._log_stay = steps / np.diff(edges)
        per_token = -np.expm1(self._log_stay)
        self._log_end = np.log(per_token)
        self._ends = -_PRIOR_WEIGHT * np.exp(log_survival[:, :-1]) * np.expm1(steps)
        self._tokens = self._ends / per_token
        each = np.array([*_SHAPES.values()]) / counts
        self._belief = np.repeat(np.log(each), counts) - 0.5 * (octaves / _OCTAVES) ** 2
        self._unseen = np.exp(self._belief) / np.exp(self._belief).sum()

    def posterior(self, pool: Floats) -> Floats:
        """The pseudo-responses after `pool` was seen, as a pool."""
        ends, tokens = pool
        log = self._belief + self._log_end @ ends + self._log_stay @ (tokens - ends)
        share = np.exp(log - log.max())
        share = (1 - _DOUBT) * share / share.sum() + _DOUBT * self._unseen
        return np.array([share @ self._ends, share @ self._tokens])


def cumulative_hazard(pool: Floats) -> Floats:
    """H = -log S at the edges of a pool's bins, float64 [bins + 1]; linear in between."""
    per_token = pool[0] / np.maximum(pool[1], 1e-300)
    per_token = np.minimum(per_token, 1 - _LOWEST_SURVIVAL)
    return np.append(0.0, np.cumsum(-np.log1p(-per_token) * np.diff(EDGES[: len(per_token) + 1])))


class LengthModel:
    """Learns the distribution of response lengths and samples futures of running responses.

    Pools this batch (finished and running responses), earlier batches (discounted) and a weak
    prior. Responses of one prompt count as any others do.

    Attributes:
        bound: the longest response, in tokens, that is possible.
        batches: batches learnt from, the current one not included.
        responses: finished responses learnt from.
        history: the pool of earlier batches, discounted.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.batches = 0
        self.responses = 0
        self.history = np.zeros((2, BINS))
        # A plan need not pay for bins beyond the bound, unless a response was longer after all.
        self._use_edges(EDGES[: np.searchsorted(EDGES, bound) + 1])
        self._start_batch()

    def finished(self, length: int, complete: bool) -> None:
        """A response stopped with `length` tokens; not `complete` when it was cut short.

        A response whose length was prescribed (`exact`) says nothing about the others and should
        not be told.
        """
        if length < 1:
            return
        self._stopped.append((length, complete))
        if len(self._stopped) >= _AT_ONCE:
            self._pool_stopped()
        self.responses += 1
        self._fresh = False

    def observe_running(self, live: LiveRequests) -> None:
        """The responses that run now; replaces what the previous call said."""
        self._running = live.num_output_tokens[~live.exact & (live.num_output_tokens > 0)]
        self._fresh = False

    def end_of_batch(self) -> None:
        """No response runs: this batch becomes history."""
        self._pool_stopped()
        if self._batch.any():
            self.history = self.history * _DISCOUNT + self._batch
            self.batches += 1
        self._start_batch()

    def sample(self, live: LiveRequests, futures: int) -> Ints:
        """Remaining tokens of each request in each of `futures` futures, int64 [n, futures].

        Each is at least 1 and within the request's bound; exactly that for `exact` requests. The
        draws of a request are stratified, in an order of its own, so futures are exchangeable and
        requests independent.
        The same draws are used throughout a batch, so predictions differ only by what was learnt.
        """
        self._refresh()
        hazard, generated = self._hazard, live.num_output_tokens
        start = np.interp(generated, self._edges, hazard)
        draws = self._draws(len(live), futures)
        remaining = (
            np.ceil(np.interp(start[:, None] + draws, hazard, self._edges)).astype(np.int64)
            - generated[:, None]
        )
        room = np.maximum(live.max_tokens - generated, 1)[:, None]
        np.clip(remaining, np.where(live.exact[:, None], room, 1), room, out=remaining)
        return remaining

    def _use_edges(self, edges: Floats) -> None:
        """Estimate the hazard up to the last of these edges."""
        self._edges = edges
        self._prior = Prior(max(1.0, self.bound * _PRIOR_MEDIAN), edges)

    def _start_batch(self) -> None:
        self._batch = np.zeros((2, BINS))
        self._stopped: list[tuple[int, bool]] = []  # of the batch, and not pooled yet
        self._running = np.zeros(0, np.int64)
        self._noise = np.zeros((0, 0))
        self._fresh = False

    def _refresh(self) -> None:
        """Estimate the hazard anew if anything has happened."""
        if self._fresh:
            return
        none = np.zeros(len(self._running), np.bool_)
        self._pool_stopped()
        pool = self._batch + pool_of(self._running, none) + self.history
        if pool[:, len(self._edges) - 1 :].any():
            self._use_edges(EDGES)
        pool = pool[:, : len(self._edges) - 1]
        pool = pool + self._prior.posterior(pool)
        self._hazard = cumulative_hazard(pool)
        self._fresh = True

    def _pool_stopped(self) -> None:
        if self._stopped:
            lengths, complete = (np.array(column) for column in zip(*self._stopped, strict=True))
            self._batch += pool_of(lengths, complete)
            self._stopped = []

    def _draws(self, requests: int, futures: int) -> Floats:
        """Stratified standard exponential draws, float64 [requests, futures]."""
        if requests > len(self._noise) or futures != self._noise.shape[1]:
            random = np.random.default_rng((_SEED, self.batches, futures))
            strata = np.tile(np.arange(futures, dtype=np.float64), (requests, 1))
            random.permuted(strata, axis=1, out=strata)
            self._noise = -np.log1p(-(strata + random.random(strata.shape)) / futures)
        return self._noise[:requests]

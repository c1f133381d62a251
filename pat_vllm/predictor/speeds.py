"""How fast requests advance beside each other, where drafts are accepted. Pure.

Drafts help some requests more than others: what repeats itself goes on doing so. The last responses
of a batch are then not only the long ones but also those that advance slowly, and a draft length
that is best for most may be too long for them. A request's own speed shows in the tokens that it
makes in its replica's steps. What is not yet known of a request is drawn from how unlike the
others are.

Looks are counted in two halves, in turns. A request that is fast in both is fast by itself. By how
much its halves differ is chance, which may last for many steps.
"""

from __future__ import annotations

import numpy as np

from pat_vllm.predictor.state import Floats, LiveRequests

_DEPENDENT = 4.0
"""Steps that are as good as one independent one, before anything shows how many are."""
_PRIOR = 200.0
"""Steps of requests that this counts as."""
_FEWEST = 4
"""Requests among which it is asked how unlike they are."""
_KEPT = 0.5
"""Share of what earlier batches say about that, beside the next one."""
_LEAST = 0.02
"""Fewest drafts that a step is expected to accept where requests are compared by them."""
_SLOWEST, _FASTEST = 0.02, 5.0
"""Bounds of what is drawn."""
_SEED = 0
"""Every time the same: looks differ by what was seen, not by luck."""


class Speeds:
    """Learns, from looks at the live requests, how many drafts of each are accepted.

    A speed is the number of accepted drafts per step, relative to what is expected of a request.
    """

    def __init__(self) -> None:
        self._weight = self._variances = 0.0
        self._chance = np.array([_DEPENDENT * _PRIOR, _PRIOR])  # as seen; of independent steps
        self._begin()

    def _begin(self) -> None:
        self._number = np.zeros(0, np.int64)
        self._seen = np.zeros((2, 0), np.int64)  # tokens of the request, steps of its replica
        # While it was looked at: drafts accepted, as many as were expected, and their variance
        # were steps independent; of each half of the looks.
        self._accepted = np.zeros((2, 3, 0))
        self._half = 0

    @property
    def variance(self) -> float:
        """Of the speeds of a fresh batch's requests; 0 until something was learnt."""
        return max(0.0, self._variances / self._weight) if self._weight else 0.0

    def observe(self, live: LiveRequests, expected: float) -> None:
        """Look at the live requests.

        Those that made no token in some of their replica's steps since the last look, because they
        waited, are not counted for that time. Nor are those that had no token then: prefill makes
        the first one, in none of these steps.

        Args:
            expected: accepted drafts of a request per step, with the draft length of the steps
                since the last look; 0: they had several, or none, and nothing is counted.
        """
        order = live.number.argsort()
        number = live.number[order]
        seen = np.stack((live.num_output_tokens, live.replica_steps))[:, order]
        accepted = np.zeros((2, 3, len(number)))
        _, here, before = np.intersect1d(
            number, self._number, assume_unique=True, return_indices=True
        )
        new = seen[:, here] - self._seen[:, before]
        new *= (new[1] > 0) & (new[0] >= new[1]) & (self._seen[0, before] > 0)
        if expected < _LEAST or (new[0] == new[1]).all():
            new[:] = 0  # there were no drafts
        steps = expected * new[1]
        accepted[:, :, here] = self._accepted[:, :, before]
        # A run of accepted drafts goes on by chance, as in a geometric distribution.
        accepted[self._half][:, here] += np.stack((new[0] - new[1], steps, steps * (1 + expected)))
        self._number, self._seen, self._accepted = number, seen, accepted
        if new[1].any():
            self._half = 1 - self._half
            self._learn(float(new[1].sum()))

    def _learn(self, steps: float) -> None:
        """Ask how unlike the requests are. The answer counts by the steps that are new."""
        known = (self._accepted[:, 1] > 0).all(axis=0)
        if known.sum() < _FEWEST:
            return
        speed, chance = _speeds(self._accepted[:, :, known])
        first, second = speed - speed.mean(axis=1, keepdims=True)
        self._weight += steps
        self._variances += steps * float(first @ second) / (len(first) - 1)
        seen = float((first - second) @ (first - second)) / (len(first) - 1)
        self._chance += steps * np.array([seen, 1.0]) / np.array([chance.sum(axis=0).mean(), 1.0])

    def moved(self) -> None:
        """Requests have other replicas now, whose steps are counted anew."""
        self._seen[1] = np.iinfo(np.int64).max // 2  # no step is new at the next look

    def end_of_batch(self) -> None:
        self._weight *= _KEPT
        self._variances *= _KEPT
        self._chance *= _KEPT
        self._begin()

    def sample(self, live: LiveRequests, futures: int) -> Floats:
        """Speeds of the requests that were looked at last, in sampled futures, float64
        [n, futures]."""
        count = len(live)
        mean, doubt = np.ones(count), np.full(count, self.variance)
        place = np.searchsorted(self._number, live.number)
        place = np.minimum(place, max(0, len(self._number) - 1))
        if len(self._number):
            accepted = self._accepted.sum(axis=0)[:, place] * (self._number[place] == live.number)
            known = accepted[1] > 0
            speed, noise = _speeds(accepted[:, known])
            noise *= self._chance[0] / self._chance[1]
            trust = self.variance / np.maximum(self.variance + noise, 1e-12)
            mean[known] += trust * (speed - 1)
            doubt[known] *= 1 - trust
        random = np.random.default_rng(_SEED)
        draws = random.standard_normal((count, futures))
        return np.clip(mean[:, None] + np.sqrt(doubt)[:, None] * draws, _SLOWEST, _FASTEST)


def _speeds(accepted: Floats) -> tuple[Floats, Floats]:
    """Speeds as they were seen, and the variance of each by chance were steps independent, from
    [..., 3, n]."""
    actual, expected, variance = np.moveaxis(accepted, -2, 0)
    return actual / expected, variance / expected**2

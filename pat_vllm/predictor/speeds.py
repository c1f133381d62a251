"""How fast requests advance beside each other, where drafts are accepted. Pure.

Drafts help some requests more than others: what repeats itself goes on doing so. The last responses
of a batch are then not only the long ones but also those that advance slowly, and a draft length
that is best for most may be too long for them. A request's own speed shows in the tokens that it
makes in its replica's steps. What is not yet known of a request is drawn from how unlike the
others are.

The steps between two observations are counted in two halves, alternately. A request that is fast in
both halves is fast by itself. By how much its halves differ is chance, whose effect may last for
many steps: a text that repeats itself is left at some time.
"""

from __future__ import annotations

import numpy as np

from pat_vllm.predictor.state import Floats, LiveRequests

_PRIOR_DEPENDENCE = 4.0
"""By how much the variance by chance is taken to be larger than if steps were independent of each
other, before anything shows by how much it is."""
_PRIOR_STEPS = 200.0
"""Steps of requests that weigh as much as this assumption."""
_FEWEST_REQUESTS = 4
"""Requests that must have been seen in both halves before their variance is computed."""
_KEPT_PER_BATCH = 0.5
"""Weight of what earlier batches taught, after each batch."""
_LEAST_ACCEPTED = 0.02
"""Expected accepted drafts of a step below which requests are not compared: with fewer, whether
one was accepted is chance for hundreds of steps."""
_SLOWEST, _FASTEST = 0.02, 5.0
"""Bounds of sampled speeds, relative to the mean: a normal distribution has no bounds."""
_SEED = 0
"""Seed of all samples: plans differ by what was seen, not by luck."""


class Speeds:
    """Learns, by observing the live requests, how many drafts of each are accepted.

    A speed is the number of accepted drafts per step, relative to what is expected of a request.
    """

    def __init__(self) -> None:
        # The variance of the requests' own speeds, times steps; and these steps.
        self._variance_sum = self._variance_steps = 0.0
        # The variance by chance as it was, relative to that of independent steps, times steps; and
        # these steps.
        self._chance_sum = _PRIOR_DEPENDENCE * _PRIOR_STEPS
        self._chance_steps = _PRIOR_STEPS
        self._begin()

    def _begin(self) -> None:
        # Of the requests that were observed last, ascending in `number`.
        self._number = np.zeros(0, np.int64)
        # Tokens of each request, and steps of its replica, int64 [2, n].
        self._seen = np.zeros((2, 0), np.int64)
        # By half of the steps and request: drafts accepted, drafts expected to be, and the variance
        # of their number if steps were independent, float64 [2, 3, n].
        self._accepted = np.zeros((2, 3, 0))
        self._half = 0

    @property
    def variance(self) -> float:
        """Variance of the speeds of a fresh batch's requests; 0 until something was learnt."""
        if not self._variance_steps:
            return 0.0
        return max(0.0, self._variance_sum / self._variance_steps)

    def observe(self, live: LiveRequests, expected: float) -> None:
        """Count what the live requests have made since the last call.

        Those that made no token in some of their replica's steps since then, because they waited,
        are not counted for that time. Nor are those that had no token then: prefill makes the
        first one, in none of these steps.

        Args:
            expected: accepted drafts of a request per step, with the draft length of the steps
                since the last call; 0: they had several lengths, or none, and nothing is counted.
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
        if expected < _LEAST_ACCEPTED or (new[0] == new[1]).all():
            new[:] = 0  # there were no drafts, or too few
        steps = expected * new[1]
        accepted[:, :, here] = self._accepted[:, :, before]
        # A run of accepted drafts goes on by chance, as in a geometric distribution.
        accepted[self._half][:, here] += np.stack((new[0] - new[1], steps, steps * (1 + expected)))
        self._number, self._seen, self._accepted = number, seen, accepted
        if new[1].any():
            self._half = 1 - self._half
            self._learn(float(new[1].sum()))

    def _learn(self, steps: float) -> None:
        """Compute how unlike the requests are. The result weighs as much as the `steps` that are
        new."""
        known = (self._accepted[:, 1] > 0).all(axis=0)
        if known.sum() < _FEWEST_REQUESTS:
            return
        speeds, noise = _speeds(self._accepted[:, :, known])
        first, second = speeds - speeds.mean(axis=1, keepdims=True)
        count = len(first)
        # What the halves have in common is the requests' own, what they have not is chance.
        self._variance_sum += steps * float(first @ second) / (count - 1)
        self._variance_steps += steps
        chance = float((first - second) @ (first - second)) / (count - 1)
        self._chance_sum += steps * chance / noise.sum(axis=0).mean()
        self._chance_steps += steps

    def moved(self) -> None:
        """Requests have other replicas now, whose steps are counted anew."""
        self._seen[1] = np.iinfo(np.int64).max // 2  # no step is new at the next call

    def end_of_batch(self) -> None:
        self._variance_sum *= _KEPT_PER_BATCH
        self._variance_steps *= _KEPT_PER_BATCH
        self._chance_sum *= _KEPT_PER_BATCH
        self._chance_steps *= _KEPT_PER_BATCH
        self._begin()

    def sample(self, live: LiveRequests, futures: int) -> Floats:
        """Speeds of live requests in sampled futures, float64 [n, futures].

        The speed of a request that was observed is drawn around what was seen of it, as far as that
        is no chance; that of any other request around 1, the mean.
        """
        count = len(live)
        mean, variance = np.ones(count), np.full(count, self.variance)
        place = np.searchsorted(self._number, live.number)
        place = np.minimum(place, max(0, len(self._number) - 1))
        if len(self._number):
            accepted = self._accepted.sum(axis=0)[:, place] * (self._number[place] == live.number)
            known = accepted[1] > 0
            speed, noise = _speeds(accepted[:, known])
            noise *= self._chance_sum / self._chance_steps
            # The posterior of a normal prior, with variance `self.variance` around 1.
            trust = self.variance / np.maximum(self.variance + noise, 1e-12)
            mean[known] += trust * (speed - 1)
            variance[known] *= 1 - trust
        random = np.random.default_rng(_SEED)
        draws = random.standard_normal((count, futures))
        return np.clip(mean[:, None] + np.sqrt(variance)[:, None] * draws, _SLOWEST, _FASTEST)


def _speeds(accepted: Floats) -> tuple[Floats, Floats]:
    """Speeds as they were seen, and the variance that each has by chance if steps are independent.

    Args:
        accepted: drafts accepted, expected to be, and the variance of their number, [..., 3, n].

    Returns:
        Both [..., n].
    """
    actual, expected, variance = np.moveaxis(accepted, -2, 0)
    return actual / expected, variance / expected**2

"""What drafts are worth: the tokens that a request gets per step, by draft length. Pure.

An n-gram drafter proposes tokens for a request whose last tokens occurred before, a *hit*, and none
for the others. The model has two kinds of numbers, which do not depend on the draft length k:

* the share of the tokens that are made in steps with a hit. The share of the *steps* does depend on
  k: the more drafts are accepted, the fewer steps the same tokens take;
* for each position, the probability that its draft is accepted if all before it were. Where a draft
  ends earlier it is not.

How many drafts a step verifies is learnt by position, too: a drafter may give fewer than are asked
for. Tokens per step follow for every k, tried or not. Evidence fades with each step and nearly ends
with new weights. What remains is a prior under which drafts pay, so that a draft length that was
given up is tried again: a change of k costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_vllm.predictor.state import Floats, Ints

_MEMORY = 300.0
"""Steps of replicas with drafts after which an observation has faded (to 1/e), and more where they
are of few requests:"""
_MEMORY_OF_ONE = 4000.0
"""so many steps of one request."""
_MEMORY_WITHOUT = 1000.0
"""Steps of replicas without drafts, likewise: after so many, drafts are tried again."""
_INDEPENDENT = 0.25
"""Observations that one counts as: what repeats itself goes on doing so, step after step."""
_PRIOR = 2.0
"""Observations that stand for what is not known yet. Half of them are successes, at a position
after the first as many as at the one before."""
_KEPT_BY_NEW_WEIGHTS = 8.0
"""Observations that remain, at most, of all that were made with other weights."""
_NEWS = 0.1
"""Share of what is known that has to be new before it is checked whether anything has changed."""
_VERSION_STEP = 0.03
"""Relative change of the tokens per step from which on they count as others."""
_KEEP = 0.98
"""Of the requests that were counted, by whether they have earlier responses, after those of each
further step."""
_SKILLS = np.geomspace(8.0, 0.125, 33)
"""Exponents of the acceptance of a request that is unlike the mean, the worst first."""


@dataclass(frozen=True)
class DraftYield:
    """What each draft length is expected to give.

    Attributes:
        lengths: the draft lengths, ascending, int64 [lengths].
        tokens: of a request per step, float64 [lengths]; at least 1, and 1 where the length is 0.
        drafts: draft tokens of a request that a step verifies, float64 [lengths].
    """

    lengths: Ints
    tokens: Floats
    drafts: Floats


PLAIN = DraftYield(np.zeros(1, np.int64), np.ones(1), np.zeros(1))
"""Decoding without drafts."""


class Acceptance:
    """Learns from counts of steps what drafts are worth. Not thread-safe.

    Attributes:
        lengths: draft lengths that the engine keeps ready, ascending, int64 [lengths].
        counts: what was tried, and what succeeded: first tokens, where a success is one made in a
            step with a hit, then drafts by position, float64 [2, 1 + longest].
        version: grows whenever what drafts are expected to give has changed by more than ~3 %
            since it last did: time for a new plan.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        assert lengths and sorted({*lengths}) == list(lengths) and lengths[0] >= 0
        self.lengths = np.array(lengths, np.int64)
        self._longest = int(lengths[-1])
        self.counts = np.zeros((2, 1 + self._longest))
        # Hits by position: that could have had a draft there, and that had. Not kept for the next
        # engine; at first each hit is expected to have as many as are asked for.
        self._of_hits = np.zeros((2, self._longest))
        self._news = 0.0
        self._asked = 0
        self.version = 0
        self._announced = self.expected().tokens

    def observe(
        self, length: int, requests: int, accepted: Ints, drafted: Ints | None = None
    ) -> None:
        """Learn from a step of a replica that verified drafts, or could have had some.

        Args:
            length: the draft length that the drafter was asked for, in the step before. 0 also
                where drafts were dropped, as in the first step after a switch.
            requests: that decoded.
            accepted: draft tokens accepted of each request that had some, int64 [hits]. Of those
                beyond `length`, left from an earlier step, nothing is learnt.
            drafted: draft tokens that these had, int64 [hits]; None: `length` each.
        """
        memory = _MEMORY if length else _MEMORY_WITHOUT
        keep = math.exp(-1 / max(memory, _MEMORY_OF_ONE / max(1, requests)))
        self._news += (1 - keep) * float(self.counts[0, 0])
        self.counts *= keep
        self._of_hits *= keep
        if length:
            assert length <= self._longest and len(accepted) <= requests
            self._asked = length
            at_least = _at_least(accepted, length)
            num_accepted = int(at_least[1:].sum())
            self.counts[:, 0] += requests + num_accepted, at_least[0] + num_accepted
            self.counts[:, 1 : length + 1] += at_least[:-1], at_least[1:]
            self._news += float(requests + num_accepted)
            self._of_hits[0, :length] += len(accepted)
            had = len(accepted) if drafted is None else _at_least(drafted, length)[1:]
            self._of_hits[1, :length] += had
        if self._news > _NEWS * self.counts[0, 0] + _NEWS:
            self._announce()

    def weights_changed(self) -> None:
        """What was observed with other weights counts for little from now on."""
        for counts in (self.counts, self._of_hits):
            keep = np.minimum(1.0, _KEPT_BY_NEW_WEIGHTS / np.maximum(counts[0], 1e-9))
            counts *= keep
        self._announce()

    def _announce(self) -> None:
        self._news = 0.0
        tokens = self.expected().tokens
        if (abs(tokens - self._announced) > _VERSION_STEP * self._announced).any():
            self._announced = tokens
            self.version += 1

    def expected(self) -> DraftYield:
        """What each draft length gives, as far as is known."""
        shares = self._mean()
        per_hit = np.append(1.0, shares[1:].cumprod()).cumsum()[self.lengths]
        tokens = 1 / (1 - shares[0] + shares[0] / per_hit)
        could, had = _INDEPENDENT * self._of_hits + _PRIOR
        had = np.minimum.accumulate(had / could)  # a draft that has ended does not go on
        of_hit = np.maximum(np.append(0.0, had.cumsum())[self.lengths], per_hit - 1)
        return DraftYield(self.lengths, tokens, shares[0] * tokens / per_hit * of_hit)

    @property
    def used(self) -> int:
        """Index of the draft length that was observed last."""
        return int(np.searchsorted(self.lengths, self._asked))

    def tokens_at(self, speeds: Floats) -> Floats:
        """Tokens per step of requests that are unlike the mean, by draft length.

        Args:
            speeds: accepted drafts per step, relative to the mean, with the draft length that was
                observed last; of any shape.

        Returns:
            float64 [lengths, *shape of speeds].
        """
        mean = self._mean()
        asked = self._asked or self._longest
        grid, at_asked = self._of_skills(mean, self.lengths), self._of_skills(mean, [asked])[0]
        usual = float(np.interp(0.0, -np.log(_SKILLS), at_asked))
        relative = (at_asked - 1) / max(usual - 1, 1e-9)
        return np.stack([np.interp(speeds, relative, tokens) for tokens in grid])

    @staticmethod
    def _of_skills(mean: Floats, lengths: Ints | Sequence[int]) -> Floats:
        """Tokens per step, float64 [lengths, skills]."""
        reached = mean[1:].cumprod()[:, None] ** _SKILLS
        per_hit = np.vstack((np.ones_like(_SKILLS), reached)).cumsum(axis=0)[lengths]
        tokens: Floats = 1 / (1 - mean[0] + mean[0] / per_hit)
        return tokens

    def _mean(self) -> Floats:
        """The shares as they are expected to be."""
        tried, succeeded = _INDEPENDENT * self.counts
        weight = tried + _PRIOR
        mean = (succeeded + 0.5 * _PRIOR) / weight
        for position in range(2, len(mean)):
            mean[position] += (mean[position - 1] - 0.5) * _PRIOR / weight[position]
        return mean

    def take(self, counts: Floats) -> None:
        """Learn what another model had learnt, perhaps of more or fewer draft lengths."""
        known = min(counts.shape[1], self.counts.shape[1])
        self.counts[:, :known] = counts[:, :known]
        self._announced = self.expected().tokens


class AcceptanceByPrompt:
    """As `Acceptance`, of a batch in which a share of the requests has earlier responses.

    Drafts from these are accepted far more often than what a request's own text suggests. So the
    two are learnt apart: the epoch in which the prompts of the first return begins with the prior,
    not with what the first has taught.

    Attributes:
        of_new: what is learnt from the others.
        of_repeated: what is learnt from these.
    """

    def __init__(self, of_new: Acceptance) -> None:
        self.of_new = of_new
        self.of_repeated = Acceptance(of_new.lengths.tolist())
        self._arrived = [0, 0]
        self._decoded = [0.0, 0.0]
        self._share = 0.0

    def arrived(self, repeated: bool) -> None:
        self._arrived[repeated] += 1
        if not any(self._decoded):
            self._share = self._arrived[1] / sum(self._arrived)

    def decoded(self, requests: int, repeated: bool) -> None:
        """So many requests of a kind have decoded in a step.

        A request of the one kind becomes one of the other when a sibling ends.
        """
        self._decoded = [_KEEP * count for count in self._decoded]
        self._decoded[repeated] += requests
        if any(self._decoded):
            self._share = self._decoded[1] / sum(self._decoded)

    def end_of_batch(self) -> None:
        """No request is left. The next ones are expected to arrive such as these did."""
        if any(self._arrived):
            self._share = self._arrived[1] / sum(self._arrived)
        self._arrived, self._decoded = [0, 0], [0.0, 0.0]

    def observe(
        self,
        length: int,
        requests: int,
        accepted: Ints,
        repeated: bool,
        drafted: Ints | None = None,
    ) -> None:
        """Learn from a step of a replica; see `Acceptance.observe`."""
        model = self.of_repeated if repeated else self.of_new
        model.observe(length, requests, accepted, drafted)

    def weights_changed(self) -> None:
        self.of_new.weights_changed()
        self.of_repeated.weights_changed()

    @property
    def version(self) -> tuple[int, int]:
        """Of what drafts are expected to give."""
        return self.of_new.version, self.of_repeated.version

    def expected(self) -> DraftYield:
        """What each draft length gives to a request of the batch in the mean."""
        new, repeated = self.of_new.expected(), self.of_repeated.expected()
        return DraftYield(
            new.lengths,
            self._mean(new.tokens, repeated.tokens),
            self._mean(new.drafts, repeated.drafts),
        )

    @property
    def used(self) -> int:
        return (self.of_repeated if self._share > 0.5 else self.of_new).used

    def per_step(self, length: int) -> float:
        """Drafts of a request that a step is expected to accept with a draft length."""
        expected = self.expected()
        return float(np.interp(length, expected.lengths, expected.tokens)) - 1

    def tokens_at(self, speeds: Floats) -> Floats:
        """Tokens per step of requests that are unlike the mean; see `Acceptance.tokens_at`."""
        return self._mean(self.of_new.tokens_at(speeds), self.of_repeated.tokens_at(speeds))

    def _mean(self, new: Floats, repeated: Floats) -> Floats:
        mean: Floats = (1 - self._share) * new + self._share * repeated
        return mean


def _at_least(counts: Ints, length: int) -> Ints:
    """How many of the counts are at least 0, 1, ... `length`, int64 [length + 1]."""
    histogram = np.bincount(np.minimum(counts, length), minlength=length + 1)
    return histogram[::-1].cumsum()[::-1]

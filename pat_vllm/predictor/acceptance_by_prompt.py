"""What drafts are worth where some requests have earlier responses to draft from. Pure.

These are accepted far more often than what a request's own text suggests. So an engine learns the
two apart: the epoch in which the prompts of the first return begins with the prior, not with what
the first has taught.
"""

from __future__ import annotations

import numpy as np

from pat_vllm.predictor.acceptance import Acceptance, Drafting
from pat_vllm.predictor.state import Floats, Ints

_KEEP = 0.98
"""Of the requests that were counted, after those of each further step."""


class AcceptanceByPrompt:
    """As `Acceptance`, of a batch in which a share of the requests has earlier responses.

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
        self._decoded = [_KEEP * one for one in self._decoded]
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

    def expected(self) -> Drafting:
        """What each draft length gives to a request of the batch in the mean."""
        new, repeated = self.of_new.expected(), self.of_repeated.expected()
        return Drafting(
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

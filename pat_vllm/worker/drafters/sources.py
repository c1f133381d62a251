"""Whether text or a drafter with weights drafts for a request, by what was accepted of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_NEWS = 0.25
"""Weight of a step in what is known of a source."""
_RETURN = 0.02
"""By which part of the way a source that was not taken returns, in a step, to what is expected of
one that was not tried: so it is tried again."""


class DraftSources:
    """What was accepted of drafts from weights (source 0) and from text (1), by request state.

    Ranks of a group choose the same, as they see the same.

    Attributes:
        accepted: draft tokens of a step, float32 [states, 2].
        source: which drafted last, int64 [states].
    """

    def __init__(self, states: int, longest: int, device: torch.device) -> None:
        """`longest`: draft tokens of a step at most."""
        # Of text that matches a long way, all are expected to be right.
        self._expected = torch.tensor([0.5 * longest, 1.0 * longest], device=device)
        self.accepted = self._expected.repeat(states, 1)
        self.source = torch.zeros(states, dtype=torch.int64, device=device)
        self._request_of = [""] * states

    def begin(self, request_ids: Sequence[str], states: Sequence[int]) -> list[int]:
        """The states that were other requests' so far, of which nothing is known yet."""
        new = [
            state
            for request_id, state in zip(request_ids, states, strict=True)
            if self._request_of[state] != request_id
        ]
        for request_id, state in zip(request_ids, states, strict=True):
            self._request_of[state] = request_id
        return new

    def reset(self, states: torch.Tensor) -> None:
        """Know nothing of these states, int64."""
        self.accepted[states] = self._expected
        self.source[states] = 0

    def forget(self) -> None:
        """All requests have left."""
        self._request_of = [""] * len(self._request_of)

    def choose(
        self,
        states: torch.Tensor,
        match: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> torch.Tensor:
        """Learn from a step, and say for which requests text drafts next, bool [requests].

        Args:
            states: state of each request, int64 [requests].
            match: tokens of the text that match its last ones; 0: none do.
            num_sampled, num_rejected: tokens that the step gave it, and drafts that it refused.
        """
        accepted, source = self.accepted[states], self.source[states]
        verified = (num_sampled > 0) & (num_sampled + num_rejected > 1)
        seen = torch.stack((source == 0, source == 1), dim=1)
        news = torch.where(
            seen,
            _NEWS * ((num_sampled - 1)[:, None] - accepted),
            _RETURN * (self._expected - accepted),
        )
        accepted = accepted + news * verified[:, None]
        takes_text = (match > 0) & (accepted[:, 1] >= accepted[:, 0])
        self.accepted[states] = accepted
        self.source[states] = takes_text.long()
        return takes_text

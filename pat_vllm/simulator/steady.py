"""What a simulated replica runs while nothing but decoding happens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pat_vllm.simulator.requests import SimulatedRequests


class Steady:
    """Requests that only decode, all of them in each step, in columns of their own. They are
    written to the requests' columns when somebody looks.

    Attributes:
        k, pace, context, longest: as in `ScheduledStep`, now.
        made: steps.
    """

    def __init__(self, requests: SimulatedRequests, running: Sequence[int], k: int) -> None:
        self.k, self.pace, self.made = k, requests.pace(running, k), 0
        self._index, outputs = requests.outputs_of(running)
        self._prompts, lengths, _ = requests.columns[:, self._index]
        self._guesses = requests.guesses if k else None
        if self._guesses is None:  # a token a step
            self._begun, in_all = outputs, lengths
        else:
            self._begun = self._guesses.steps_made(self._index, outputs, k)
            in_all = self._guesses.steps_in_all(self._index, k)
        self._left = in_all - self._begun
        self._first_end = int(self._left.min())
        self._count()

    def _count(self) -> None:
        steps = self._begun + self.made
        if self._guesses is not None:
            steps = self._guesses.outputs(self._index, steps, self.k)
        self._outputs = steps
        tokens = self._prompts + self._outputs
        self.context, self.longest = int(tokens.sum()), int(tokens.max(initial=0))

    @property
    def least(self) -> int:
        """Steps to the end of the request that ends first."""
        return self._first_end - self.made

    def advance(self, requests: SimulatedRequests, running: list[int], steps: int) -> list[int]:
        """Make steps; requests that have their length leave `running` and are returned."""
        self.made += steps
        complete: list[int] = []
        if self._first_end <= self.made:
            over = self._left <= self.made
            complete = self._index[over].tolist()
            lengths, outputs = requests.columns[1], requests.num_output_tokens
            requests.decode(self._index[over], (lengths - outputs)[complete])
            for request in complete:
                running.remove(request)
            left = ~over
            self._index, self._prompts = self._index[left], self._prompts[left]
            self._begun, self._left = self._begun[left], self._left[left]
            self._first_end = int(self._left.min(initial=np.iinfo(np.int64).max))
        self._count()
        return complete

    def write(self, requests: SimulatedRequests) -> None:
        """Write the requests' columns."""
        missing = self._outputs - requests.num_output_tokens[self._index]
        requests.decode(self._index, missing)

"""What a simulated replica runs while nothing but decoding happens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pat_vllm.simulator.requests import SimulatedRequests


class Steady:
    """Requests that only decode, all of them in each step. What they have in common is counted
    once, and written to the requests' columns when somebody looks.

    Attributes:
        context, longest: as in `ScheduledStep`, now.
        made: steps.
        written: those of them that the columns have.
    """

    k = 0
    pace = 1.0

    def __init__(self, requests: SimulatedRequests, running: Sequence[int]) -> None:
        index, outputs = requests.outputs_of(running)
        prompts, lengths, _ = requests.columns[:, index]
        tokens = (prompts + outputs).tolist()
        self.context, self.longest, self.made = sum(tokens), max(tokens), 0
        self.written = 0
        self._over: set[int] = set()
        left = (lengths - outputs).tolist()
        self._by_end = sorted(zip(left, running, strict=True), reverse=True)
        self._by_tokens = sorted(zip(tokens, running, strict=True))

    @property
    def least(self) -> int:
        """Tokens to come of the request with fewest."""
        return self._by_end[-1][0] - self.made

    def advance(self, requests: SimulatedRequests, running: list[int], steps: int) -> list[int]:
        """Make steps; requests that have their length leave `running` and are returned."""
        self.made += steps
        self.context += steps * len(running)
        self.longest += steps
        complete = []
        while self._by_end and self._by_end[-1][0] <= self.made:
            request = self._by_end.pop()[1]
            requests.decode(request, self.made - self.written)
            self.context -= requests.num_tokens(request)
            complete.append(request)
            running.remove(request)
        if complete and running:
            self._over.update(complete)
            while self._by_tokens[-1][1] in self._over:
                self._by_tokens.pop()
            self.longest = self._by_tokens[-1][0] + self.made
        return complete

    def write(self, requests: SimulatedRequests, running: Sequence[int]) -> None:
        """Write the columns of what runs."""
        if self.made > self.written:
            requests.decode(np.array(running, np.int64), self.made - self.written)
            self.written = self.made


class SteadyWithDrafts:
    """As `Steady`, with drafts: a step makes several tokens of a request."""

    def __init__(self, requests: SimulatedRequests, running: Sequence[int], k: int) -> None:
        self.k = k
        self.pace = requests.pace(running, k)
        self._index, outputs = requests.outputs_of(running)
        self._prompts = requests.columns[0, self._index]
        self._guesses, self.made = requests.guesses, 0
        self._begun = self._guesses.steps_made(self._index, outputs, k)
        self._left = self._guesses.steps_in_all(self._index, k) - self._begun
        self._first_end = int(self._left.min())
        self._count()

    def _count(self) -> None:
        self._outputs = self._guesses.outputs(self._index, self._begun + self.made, self.k)
        tokens = self._prompts + self._outputs
        self.context, self.longest = int(tokens.sum()), int(tokens.max(initial=0))

    @property
    def least(self) -> int:
        return self._first_end - self.made

    def advance(self, requests: SimulatedRequests, running: list[int], steps: int) -> list[int]:
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

    def write(self, requests: SimulatedRequests, running: Sequence[int]) -> None:
        missing = self._outputs - requests.num_output_tokens[self._index]
        requests.decode(self._index, missing)

"""The requests of a trace, as they come to a scheduler of vLLM's or PAT's."""

from __future__ import annotations

import random
from collections.abc import Iterator

from vllm.v1.request import Request

from pat_vllm.simulator.traces import LengthTrace
from tests.vllm.without_workers import request_of


class Arrivals:
    """Requests with random prompts, which of a later turn begin with what the one before it holds.

    Attributes:
        requests: those that have come, by their number in the trace.
        draw: random tokens.
        waiting: when those come of which that is known.
    """

    def __init__(self, trace: LengthTrace) -> None:
        self.requests: dict[int, Request] = {}
        self.draw = random.Random(0)
        self._trace = trace
        self._after = trace.after or [-1] * len(trace)
        self._next = {before: i for i, before in enumerate(self._after) if before >= 0}
        self.waiting = {i: 0.0 for i, before in enumerate(self._after) if before < 0}

    def until(self, now: float) -> Iterator[Request]:
        """Those that have come by now."""
        for number in sorted(self.waiting, key=lambda i: (self.waiting[i], i)):
            if self.waiting[number] > now:
                return
            del self.waiting[number]
            before = self._after[number]
            held = list(self.requests[before].all_token_ids) if before >= 0 else []
            count = self._trace.num_prompt_tokens[number] - len(held)
            prompt = [*held, *(self.draw.randrange(3, 300) for _ in range(count))]
            self.requests[number] = request_of(str(number), prompt, self._trace.lengths[number])
            yield self.requests[number]

    def follow(self, now: float) -> None:
        """Turns whose turn before has ended now are to come."""
        for number, later in [*self._next.items()]:
            if number in self.requests and self.requests[number].is_finished():
                del self._next[number]
                self.waiting[later] = now + self._trace.arrivals[later]

"""The requests of a simulated engine, as columns. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from pat_vllm.predictor.state import Ints
from pat_vllm.simulator.accepted_drafts import AcceptedDraftTokens
from pat_vllm.simulator.traces import LengthTrace


class SimulatedRequests:
    """The requests of a trace by index, as columns.

    Attributes:
        num_prompt_tokens, length, group: fixed; `length` is what a response will have.
        columns: these three, int64 [3, requests].
        max_tokens: that each response can have, int64 [requests].
        arrival: when each request arrives; infinite while it continues one that has not ended.
        has_turns: whether a request continues another.
        trajectory: the first request of each request's trajectory, int64 [requests].
        num_output_tokens: generated so far, int64 [requests].
        num_computed_tokens: tokens whose KV is in memory; all of them while a request decodes,
            int64 [requests].
        finished: when each response ended, NaN before.
        prefilled: prompt tokens computed, those computed again included.
        preempted: how often a request lost its KV for want of memory.
    """

    def __init__(self, trace: LengthTrace, began: float) -> None:
        """None has started; arrivals count from `began`."""
        self.columns = np.array([trace.num_prompt_tokens, trace.lengths, trace.groups], np.int64)
        self.num_prompt_tokens, self.length, self.group = self.columns.tolist()
        self.arrival = [began + float(at) for at in trace.arrivals]
        self.max_tokens = trace.max_tokens + np.array(trace.lengths) - np.array(trace.followed)
        self.has_turns = trace.has_turns
        self.trajectory = np.array(trace.first, np.int64)
        self._before: dict[int, int] = {}
        self._next: dict[int, int] = {}
        for request, before in enumerate(trace.after):
            if before >= 0:
                self._before[request], self._next[before] = before, request
                self.arrival[request] = math.inf
        self._trace = trace
        self.num_output_tokens, self.num_computed_tokens = np.zeros((2, len(self.length)), np.int64)
        self.finished = [math.nan] * len(self.length)
        self.prefilled = 0
        self.preempted = 0

    def __len__(self) -> int:
        return len(self.length)

    def before(self, request: int) -> int | None:
        """The request that one continues."""
        return self._before.get(request)

    def next(self, request: int) -> int | None:
        """The request that continues one."""
        return self._next.get(request)

    def end(self, request: int, at: float) -> int | None:
        """A request has ended.

        Returns:
            The one that continues it, whose arrival is known now.
        """
        self.finished[request] = at
        if (following := self.next(request)) is not None:
            self.arrival[following] = at + float(self._trace.arrivals[following])
        return following

    @cached_property
    def guesses(self) -> AcceptedDraftTokens:
        """Which of their tokens a drafter guesses."""
        return AcceptedDraftTokens.of(self._trace)

    def decode(self, requests: Sequence[int], steps: int, k: int) -> None:
        """Requests have decoded in each of `steps` steps with draft length `k`."""
        index, tokens = np.array(requests, np.int64), self.tokens_in(requests, steps, k)
        self.num_output_tokens[index] += tokens
        self.num_computed_tokens[index] += tokens

    def tokens_in(self, requests: Sequence[int], steps: int, k: int) -> int | Ints:
        """Tokens that requests make in their next `steps` steps with draft length `k`."""
        if not k:
            return steps
        index, before = self.outputs_of(requests)
        total_steps = self.guesses.steps_made(index, before, k) + steps
        return self.guesses.outputs(index, total_steps, k) - before

    def steps_left(self, requests: Sequence[int], k: int) -> int:
        """Fewest steps with draft length `k` to the end of one of the requests, at least one."""
        index, outputs = self.outputs_of(requests)
        if not k:
            return int((self.columns[1, index] - outputs).min())
        left = self.guesses.steps_in_all(index, k) - self.guesses.steps_made(index, outputs, k)
        return int(left.min())

    def pace(self, requests: Sequence[int], k: int) -> float:
        """Tokens of a request per step with draft length `k`, in the mean over their rest."""
        if not k or not requests:
            return 1.0
        return float(self.guesses.draft_yield(*self.outputs_of(requests), [k]).tokens[0])

    def outputs_of(self, requests: Sequence[int]) -> tuple[Ints, Ints]:
        """Indices of requests and their output tokens so far, int64 [requests] each."""
        index = np.array(requests, np.int64)
        return index, self.num_output_tokens[index]

    def tokens_of(self, requests: Sequence[int]) -> tuple[Ints, Ints]:
        """Indices of requests and their tokens so far, prompts included, int64 [requests] each."""
        index, outputs = self.outputs_of(requests)
        return index, self.columns[0, index] + outputs

    def num_tokens(self, request: int) -> int:
        """Prompt and output so far."""
        return self.num_prompt_tokens[request] + int(self.num_output_tokens[request])

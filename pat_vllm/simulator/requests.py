"""The requests of a simulated engine, as columns. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from pat_vllm.predictor.state import Ints
from pat_vllm.simulator.guesses import GuessedTokens
from pat_vllm.simulator.traces import LengthTrace


class SimulatedRequests:
    """The requests of a trace by index, as columns.

    Attributes:
        num_prompt_tokens, length, group, arrival: fixed; `length` is what a response will have.
        columns: the first three of them, int64 [3, requests].
        max_tokens: of every request.
        num_output_tokens: generated so far.
        num_computed_tokens: tokens whose KV is in memory; all of them while a request decodes.
        finished: when each response ended, NaN before.
        prefilled: prompt tokens computed, those computed again included.
        preempted: how often a request lost its KV for want of memory.
    """

    def __init__(self, trace: LengthTrace, began: float) -> None:
        """None has started; arrivals count from `began`."""
        self.columns = np.array([trace.num_prompt_tokens, trace.lengths, trace.groups], np.int64)
        self.num_prompt_tokens, self.length, self.group = self.columns.tolist()
        self.arrival = [began + float(at) for at in trace.arrivals]
        self.max_tokens = int(trace.max_tokens)
        self._trace = trace
        self.num_output_tokens = [0] * len(self.length)
        self.num_computed_tokens = [0] * len(self.length)
        self.finished = [math.nan] * len(self.length)
        self.prefilled = 0
        self.preempted = 0

    def __len__(self) -> int:
        return len(self.length)

    @cached_property
    def guesses(self) -> GuessedTokens:
        """Which of their tokens a drafter guesses."""
        return GuessedTokens.of(self._trace)

    def decode(self, request: int, tokens: int) -> None:
        """A request has generated so many tokens."""
        self.num_output_tokens[request] += tokens
        self.num_computed_tokens[request] += tokens

    def decode_all(self, requests: Sequence[int], steps: int, k: int) -> None:
        """Requests have decoded in each of `steps` steps with draft length `k`."""
        if not k:
            for request in requests:
                self.decode(request, steps)
            return
        index, before = self.outputs_of(requests)
        made = self.guesses.steps_made(index, before, k) + steps
        after = self.guesses.outputs(index, made, k)
        for request, tokens in zip(requests, (after - before).tolist(), strict=True):
            self.decode(request, tokens)

    def steps_left(self, requests: Sequence[int], k: int) -> int:
        """Fewest steps with draft length `k` to the end of one of the requests, at least one."""
        if not k:
            return min([self.length[i] - self.num_output_tokens[i] for i in requests])
        index, outputs = self.outputs_of(requests)
        left = self.guesses.steps_in_all(index, k) - self.guesses.steps_made(index, outputs, k)
        return int(left.min())

    def pace(self, requests: Sequence[int], k: int) -> float:
        """Tokens of a request per step with draft length `k`, in the mean over their rest."""
        if not k or not requests:
            return 1.0
        return float(self.guesses.drafting(*self.outputs_of(requests), [k]).tokens[0])

    def outputs_of(self, requests: Sequence[int]) -> tuple[Ints, Ints]:
        """Indices of requests and their tokens so far, int64 [requests] each."""
        outputs = self.num_output_tokens
        return np.array(requests, np.int64), np.array([outputs[i] for i in requests], np.int64)

    def num_tokens(self, request: int) -> int:
        """Prompt and output so far."""
        return self.num_prompt_tokens[request] + self.num_output_tokens[request]

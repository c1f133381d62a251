"""One replica of a simulated engine: which requests its next step computes. Pure.

As vLLM's scheduler does it: running requests first, prompts in chunks within the budget of a step,
the newest request preempted where memory is short.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.simulator.drafts import AcceptedDrafts
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.predictor.state import Ints
from pat_vllm.profile import Profile, StepShape


class SimulatedRequests:
    """The requests of a trace by index, as columns.

    Attributes:
        arrivals: when each request arrives, on the simulated clock.
        prompt, length, group: fixed, int64 [requests]; `length` is what a response will have.
        outputs: tokens generated so far, int64 [requests].
        computed: tokens whose KV is in memory; all of them while a request decodes, int64
            [requests].
        finished: when each response ended, NaN before.
        prefilled: prompt tokens computed, those computed again included.
        preempted: how often a request lost its KV for want of memory.
    """

    def __init__(self, trace: LengthTrace, began: float) -> None:
        """None has started; arrivals count from `began`."""
        self.arrivals = [began + at for at in trace.arrivals]
        self.prompt = np.array(trace.num_prompt_tokens, np.int64)
        self.length = np.array(trace.lengths, np.int64)
        self.group = np.array(trace.groups, np.int64)
        self.outputs, self.computed = np.zeros((2, len(trace)), np.int64)
        self.finished = [math.nan] * len(trace)
        self.prefilled = self.preempted = 0
        self._trace = trace

    @cached_property
    def drafts(self) -> AcceptedDrafts:
        """Which of their tokens a drafter guesses."""
        return AcceptedDrafts(self._trace)

    def tokens(self, requests: Ints | int) -> Ints:
        """Prompts and outputs so far."""
        return self.prompt[requests] + self.outputs[requests]


class FreeMemory:
    """Free KV memory of a replica, and what preempted requests have left in it.

    As vLLM's prefix cache keeps it: what was freed first is overwritten first.

    Attributes:
        total: tokens whose KV is free.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._freed: OrderedDict[object, int] = OrderedDict({object(): total})  # the oldest first

    def free(self, tokens: int, owner: int | None = None) -> None:
        """A request does not hold these tokens any more; `owner` names it if it is to come back."""
        self.total += tokens
        self._freed[object() if owner is None else owner] = tokens

    def overwrite(self, tokens: int) -> None:
        """Requests hold so many tokens more."""
        self.total -= tokens
        while tokens > 0 and self._freed:
            oldest, left = next(iter(self._freed.items()))
            if left > tokens:
                self._freed[oldest] = left - tokens
            else:
                del self._freed[oldest]
            tokens -= left

    def take_back(self, owner: int) -> int:
        """A request comes back: its tokens whose KV is still there, and is held again."""
        tokens = self._freed.pop(owner, 0)
        self.total -= tokens
        return tokens


@dataclass(frozen=True)
class ScheduledStep:
    """What a step computes.

    Attributes:
        decoding: requests that decode, int64 [n].
        accepted: drafts of each that are accepted, int64 [n].
        prefilling: (request, tokens of it that the step computes).
    """

    decoding: Ints
    accepted: Ints
    prefilling: list[tuple[int, int]]
    shape: StepShape


class SimulatedReplica:
    """A replica, its requests by index, and the step in flight.

    Attributes:
        room: tokens whose KV its memory holds.
        running, waiting: requests, the oldest first.
        step: in flight, or None; it takes `seconds` until `end`.
        made: steps since the layout became active.
    """

    def __init__(self, index: int, requests: SimulatedRequests, profile: Profile, tp: int) -> None:
        """An idle one.

        Args:
            requests: of the trace.
            profile: of the engine, whose limits and memory a replica with `tp` ranks has.
        """
        self.index = index
        self.room = profile.kv_tokens[tp]
        self.running: list[int] = []
        self.waiting: deque[int] = deque()
        self.step: ScheduledStep | None = None
        self.seconds = 0.0
        self.end = math.inf
        self.made = 0
        self._free = FreeMemory(self.room)
        self._cached_prompts: set[int] = set()
        self._requests, self._tp = requests, tp
        self._max_num_seqs, self._budget = profile.max_num_seqs[tp], profile.max_batch_tokens[tp]

    @property
    def num_seqs(self) -> int:
        """Requests, waiting ones included."""
        return len(self.running) + len(self.waiting)

    def schedule(
        self, busy: int = 1, draft_length: Callable[[int], int] = lambda batch: 0
    ) -> ScheduledStep:
        """Choose what the next step computes, and admit waiting requests to it.

        Args:
            busy: replicas that have work.
            draft_length: by the number of requests in the step.

        Raises:
            ValueError: a request does not fit into the replica's memory.
        """
        room, requests, computed = self._make_room(), self._requests, self._requests.computed
        running = np.array(self.running, np.int64)
        missing = requests.tokens(running) - computed[running]
        decoding: list[int] = running[missing <= 0].tolist()
        budget = self._budget - len(decoding)
        prefilling: list[tuple[int, int]] = []

        def prefill(request: int, tokens: int) -> None:
            nonlocal budget
            if tokens := min(tokens, budget):
                prefilling.append((request, tokens))
                budget -= tokens

        for request, tokens in zip(running.tolist(), missing.tolist(), strict=True):
            if tokens > 0:
                prefill(request, tokens)
        while self.waiting and len(self.running) < self._max_num_seqs and budget > 0:
            request = self.waiting[0]
            tokens, group = int(requests.tokens(request)), int(requests.group[request])
            # Only a switch brings KV of a request that waits.
            if not computed[request]:
                if tokens + 1 > room:
                    break
                room -= tokens + 1
                computed[request] = min(tokens - 1, self._free.take_back(request))
                if group in self._cached_prompts and not requests.outputs[request]:
                    computed[request] = tokens - 1  # the last token is computed in any case
            elif rest := tokens - int(computed[request]):
                if rest + 1 > room and self.running:
                    break
                room -= rest + 1
            self._cached_prompts.add(group)
            self.running.append(self.waiting.popleft())
            if rest := tokens - int(computed[request]):
                prefill(request, rest)
            else:
                decoding.append(request)
                budget -= 1
                room -= 1
        if not decoding and not prefilling:
            raise self._too_long(int(requests.tokens(self.waiting[0])))
        batch = np.array(decoding, np.int64)
        context, k = requests.tokens(batch), draft_length(len(self.running))
        self.step = ScheduledStep(
            batch,
            requests.drafts.accepted(batch, requests.outputs[batch], k) if k else 0 * batch,
            prefilling,
            StepShape(
                len(batch),
                int(context.sum()),
                int(context.max(initial=0)),
                sum(tokens for _, tokens in prefilling),
                busy,
                drafts=k * len(batch),
                k=k,
            ),
        )
        return self.step

    def finish(self) -> list[int]:
        """The step is over.

        Returns:
            The requests that have ended; they have left.
        """
        assert self.step is not None
        requests, step = self._requests, self.step
        requests.outputs[step.decoding] += 1 + step.accepted
        requests.computed[step.decoding] += 1 + step.accepted
        stepped = step.decoding.tolist()
        for request, tokens in step.prefilling:
            requests.prefilled += tokens
            requests.computed[request] += tokens
            if requests.computed[request] == requests.tokens(request):
                requests.outputs[request] += 1
                requests.computed[request] += 1
                stepped.append(request)
        self.made += 1
        self.step, self.end = None, math.inf
        ended = [i for i in stepped if requests.outputs[i] >= requests.length[i]]
        for request in ended:
            self.running.remove(request)
            self._free.free(int(requests.tokens(request)))
        return ended

    def _make_room(self) -> int:
        """Preempt, newest first, until every running request can take another token.

        Returns:
            Tokens that are free besides.
        """
        computed = self._requests.computed
        while (unused := self._unused()) < 0:
            if any(computed[i] for i in self.waiting):
                victim = next(i for i in reversed(self.waiting) if computed[i])
            elif len(self.running) > 1:
                victim = self.running.pop()
                self.waiting.appendleft(victim)
            else:
                raise self._too_long(self.room - unused)
            self._free.free(int(computed[victim]), victim)
            computed[victim] = 0
            self._requests.preempted += 1
        self._free.overwrite(self._free.total - unused)
        return unused

    def _unused(self) -> int:
        """Tokens of memory that no request holds, or needs for its next token."""
        held = int(self._requests.computed[list(self.waiting)].sum())
        # A request in prefill has its whole prompt reserved.
        tokens = self._requests.tokens(np.array(self.running, np.int64))
        return self.room - held - int((tokens + 1).sum())

    def _too_long(self, tokens: int) -> ValueError:
        return ValueError(
            f"tp={self._tp}: a replica's memory cannot hold the KV of a request of {tokens} "
            "tokens; shorten the responses, or take a profile with larger kv_tokens"
        )

"""One replica of a simulated engine: which requests its next steps compute. Pure.

As vLLM's scheduler does it: running requests first, prompts in chunks within the budget of a step,
the newest request preempted where memory is short.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pat_vllm.predictor.state import Ints
from pat_vllm.profile import Profile, StepShape
from pat_vllm.simulator.free_memory import FreeMemory
from pat_vllm.simulator.simulated_requests import SimulatedRequests

_ROUNDING = 1e-6
"""Part of a step that is rounding error when times are compared."""
_BLOCK = 16
"""Tokens of a block of KV, as vLLM has by default: whole blocks are cached."""


@dataclass(frozen=True)
class ScheduledStep:
    """What a replica's next step computes.

    Attributes:
        decoding: requests that generate a token each.
        prefilling: (request, tokens of it that the step computes).
        context: tokens of the decoding requests in all.
        longest: the most tokens of a decoding request.
        steps_to_first_end: steps until the first of the decoding requests ends.
        free_tokens: tokens whose KV fits besides.
        k: draft length.
        pace: tokens of a decoding request per step.
    """

    decoding: list[int]
    prefilling: list[tuple[int, int]]
    context: int
    longest: int
    steps_to_first_end: int
    free_tokens: int
    k: int
    pace: float

    def shape(self, steps: int, busy: int) -> StepShape:
        """The middle one of `steps` such steps, while `busy` replicas have work."""
        middle = self.pace * (steps - 1) / 2
        batch = len(self.decoding)
        return StepShape(
            batch,
            self.context + int(batch * middle),
            self.longest + int(middle),
            sum([tokens for _, tokens in self.prefilling]),
            busy,
            drafts=self.k * batch,
            k=self.k,
        )


_NONE = ScheduledStep([], [], 0, 0, 1, 0, 0, 1.0)


class SimulatedReplica:
    """A replica, its requests by index, and its chunk: steps that are simulated as one.

    Attributes:
        room: tokens whose KV its memory holds.
        free: memory that nothing holds, with the contexts of ended turns.
        cached_prompts: groups of requests with one prompt, which was computed here and is assumed
            to stay in memory.
        scheduled: what the first step of the chunk computes.
        steps: of the chunk; 0 between chunks.
        made: steps before the chunk, since the layout became active.
        began: when the chunk began.
        per_step: seconds of each of its steps, whose shape is `shape`.
        end: when the chunk is over; infinite between chunks.
        steady: whether the chunk decodes all requests and nothing else happens. The next one is
            taken to have the same pace then.
    """

    shape: StepShape

    def __init__(self, index: int, requests: SimulatedRequests, profile: Profile, tp: int) -> None:
        """An idle one.

        Args:
            requests: of the trace.
            profile: of the engine, whose limits and memory a replica with `tp` ranks has.
        """
        self.index = index
        self.room = profile.kv_tokens[tp]
        self.free = FreeMemory(self.room)
        self.running: list[int] = []
        self.waiting: deque[int] = deque()
        self.cached_prompts: set[int] = set()
        self.scheduled = _NONE
        self.steps = self.made = 0
        self.began = self.per_step = 0.0
        self.end = math.inf
        self.steady = False
        self._requests, self._profile, self._tp = requests, profile, tp

    @property
    def num_seqs(self) -> int:
        """Requests, waiting ones included."""
        return len(self.running) + len(self.waiting)

    def accepted(self, most: int) -> list[Ints]:
        """Of each of the chunk's first `most` steps: accepted drafts of each decoding request."""
        index, outputs = self._requests.outputs_of(self.scheduled.decoding)
        guesses, accepted, k = self._requests.guesses, [], self.scheduled.k
        begun = guesses.steps_made(index, outputs, k)
        for step in range(min(most, self.steps)):
            outputs = guesses.outputs(index, begun + step, k)
            accepted.append(guesses.accepted(index, outputs, k))
        return accepted

    def set_steps(self, steps: int) -> None:
        """The chunk has so many steps."""
        self.steps = steps
        self.end = self.began + steps * self.per_step if steps else math.inf

    @property
    def rounding(self) -> float:
        """Seconds that are rounding error where ends of steps are compared."""
        return _ROUNDING * self.per_step

    def steps_made(self, now: float, started: bool = False) -> int:
        """Steps of the chunk that are over by `now`, or have `started`."""
        if not self.steps:
            return 0
        elapsed = (now - self.began) / self.per_step
        steps = (
            max(1, math.ceil(elapsed - _ROUNDING)) if started else math.floor(elapsed + _ROUNDING)
        )
        return min(steps, self.steps)

    def schedule(self, draft_length: Callable[[int], int] = lambda batch: 0) -> ScheduledStep:
        """Choose what the next step computes, and admit waiting requests to it.

        Args:
            draft_length: by the number of requests in the step.

        Raises:
            ValueError: a request does not fit into the replica's memory.
        """
        room, steady = self._make_room(), self.steady and not self.waiting
        requests, computed = self._requests, self._requests.num_computed_tokens
        index, all_tokens = requests.tokens_of(self.running)
        uncomputed = all_tokens - computed[index]
        ready = uncomputed <= 0
        decoding: list[int] = index[ready].tolist()
        context, longest = int(all_tokens[ready].sum()), int(all_tokens[ready].max(initial=0))
        budget = self._profile.max_batch_tokens[self._tp] - len(decoding)
        prefilling: list[tuple[int, int]] = []
        for request, missing in zip(
            index[~ready].tolist(), uncomputed[~ready].tolist(), strict=True
        ):
            if budget > 0:
                prefilling.append((request, min(missing, budget)))
                budget -= min(missing, budget)
        most = self._profile.max_num_seqs[self._tp]
        while self.waiting and len(self.running) < most and budget > 0:
            request = self.waiting[0]
            tokens = requests.num_tokens(request)
            group = requests.group[request]
            # Only a switch brings KV of a request that waits.
            if not computed[request]:
                if tokens + 1 > room:
                    break
                room -= tokens + 1
                computed[request] = min(tokens - 1, self._take_back(request))
                if group in self.cached_prompts and not requests.num_output_tokens[request]:
                    computed[request] = tokens - 1  # the last token is computed in any case
            elif rest := tokens - int(computed[request]):
                if rest + 1 > room and self.running:
                    break
                room -= rest + 1
            if requests.before(request) is None:
                self.cached_prompts.add(group)
            self.running.append(self.waiting.popleft())
            if missing := tokens - int(computed[request]):
                prefilling.append((request, min(missing, budget)))
                budget -= min(missing, budget)
            else:
                decoding.append(request)
                context += tokens
                longest = max(longest, tokens)
                budget -= 1
                room -= 1
        if not decoding and not prefilling:
            raise self._too_long(requests.num_tokens(self.waiting[0]))
        k = draft_length(len(self.running))
        self.steady = not self.waiting and len(decoding) == len(self.running)
        if self.steady:
            decoding = self.running
        least = requests.steps_left(decoding, k) if decoding else 1
        alike = steady and k == self.scheduled.k
        pace = self.scheduled.pace if alike else requests.pace(decoding, k)
        self.scheduled = ScheduledStep(decoding, prefilling, context, longest, least, room, k, pace)
        return self.scheduled

    def finish(self, steps: int) -> list[int]:
        """`steps` steps of the chunk are over, and the chunk with them.

        Returns:
            The requests that have ended, by their lengths (`columns[1]`); they have left.
        """
        requests = self._requests
        outputs, computed = requests.num_output_tokens, requests.num_computed_tokens
        stepped = self.scheduled.decoding
        requests.decode(stepped, steps, self.scheduled.k)
        for request, tokens in self.scheduled.prefilling:
            requests.prefilled += tokens
            computed[request] += tokens
            if computed[request] == requests.num_tokens(request):
                outputs[request] += 1
                computed[request] += 1
                stepped = [*stepped, request]
        self.made += steps
        self.set_steps(0)
        if steps > 1:
            # What they have overwritten, up to the last one, which had room before it began.
            self.free.overwrite(self.free.total - self._unused() - len(self.running))
        index = np.array(stepped, np.int64)
        complete: list[int] = index[outputs[index] >= requests.columns[1, index]].tolist()
        for request in complete:
            self.running.remove(request)
            owner = request if requests.has_turns else None
            self.free.free(requests.num_tokens(request), owner)
        return complete

    def cached(self, request: int) -> int:
        """Tokens of a request's prompt that earlier turns have left here."""
        before = self._left_by(request)
        return 0 if before is None else self.free.left_by(before)

    def _left_by(self, request: int) -> int | None:
        """The latest of the turns before a request that has left something here: the trajectory may
        have been elsewhere since."""
        before = self._requests.before(request)
        while before is not None and not self.free.left_by(before):
            before = self._requests.before(before)
        return before

    def _take_back(self, request: int) -> int:
        """A request is admitted: the tokens whose KV is there, by itself or a turn before it."""
        own = self.free.take_back(request)
        if own or (before := self._left_by(request)) is None:
            return own
        # The last token of a response is never computed.
        return max(0, self.free.take_back(before) - 1) // _BLOCK * _BLOCK

    def forget_overwritten(self) -> None:
        """Forget the contexts that requests have overwritten since the last step was scheduled."""
        self.free.overwrite(self.free.total - self._unused())

    def _unused(self) -> int:
        """Tokens of memory that no request holds, or needs for its next token."""
        held = int(self._requests.num_computed_tokens[list(self.waiting)].sum())
        # A request in prefill has its whole prompt reserved.
        _, tokens = self._requests.tokens_of(self.running)
        return self.room - held - int((tokens + 1).sum())

    def _make_room(self) -> int:
        """Preempt, newest first, until every running request can take another token.

        Returns:
            Tokens that are free besides.
        """
        computed = self._requests.num_computed_tokens
        while (unused := self._unused()) < 0:
            if any(computed[i] for i in self.waiting):
                victim = next(i for i in reversed(self.waiting) if computed[i])
            elif len(self.running) > 1:
                victim = self.running.pop()
                self.waiting.appendleft(victim)
            else:
                raise self._too_long(self.room - unused)
            self.free.free(int(computed[victim]), victim)
            computed[victim] = 0
            self._requests.preempted += 1
        self.free.overwrite(self.free.total - unused)
        return unused

    def _too_long(self, tokens: int) -> ValueError:
        return ValueError(
            f"tp={self._tp}: a replica's memory cannot hold the KV of a request of {tokens} "
            "tokens; shorten the responses, or take a profile with larger kv_tokens"
        )

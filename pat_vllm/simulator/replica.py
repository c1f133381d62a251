"""One replica of a simulated engine: which requests its next steps compute. Pure.

As vLLM's scheduler does it: running requests first, prompts in chunks within the budget of a step,
the newest request preempted where memory is short.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pat_vllm.profiling.profile import Profile, StepShape

if TYPE_CHECKING:
    from pat_vllm.simulator.traces import LengthTrace

_ROUNDING = 1e-6
"""Part of a step that is rounding error when times are compared."""
_NOTHING = StepShape(0, 0, 0)


@dataclass(frozen=True)
class ReplicaCapacity:
    """What a replica can hold.

    Attributes:
        max_num_seqs: requests that it runs at once, by tp or in every layout; the others wait.
        max_batch_tokens: tokens that one of its steps computes, by tp or in every layout.
        kv_tokens: tokens whose KV it has memory for, by tp; unlimited where not named.
        kv_bytes_per_token: KV bytes of a token over all layers and KV heads.
    """

    max_num_seqs: int | Mapping[int, int] = 256
    max_batch_tokens: int | Mapping[int, int] = 8192
    kv_tokens: Mapping[int, int] = field(default_factory=dict)
    kv_bytes_per_token: int = 0

    @classmethod
    def of(cls, profile: Profile) -> ReplicaCapacity:
        """That of a profile's engine."""
        return cls(
            profile.max_num_seqs,
            profile.max_batch_tokens,
            profile.kv_tokens,
            profile.kv_bytes_per_token,
        )

    def most_seqs(self, tp: int) -> int:
        """`max_num_seqs` in the layout of this tp."""
        return _of_layout(self.max_num_seqs, tp)

    def most_tokens(self, tp: int) -> int:
        """`max_batch_tokens` in the layout of this tp."""
        return _of_layout(self.max_batch_tokens, tp)

    def kv_room(self, tp: int) -> float:
        """Tokens whose KV a replica has memory for; infinite where that is not limited."""
        return self.kv_tokens.get(tp, math.inf)


def _of_layout(limit: int | Mapping[int, int], tp: int) -> int:
    return limit if isinstance(limit, int) else limit[tp]


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
        self.num_output_tokens = [0] * len(self.length)
        self.num_computed_tokens = [0] * len(self.length)
        self.finished = [math.nan] * len(self.length)
        self.prefilled = 0
        self.preempted = 0

    def __len__(self) -> int:
        return len(self.length)

    def decode(self, request: int, steps: int) -> None:
        """A request has generated a token in each of `steps` steps."""
        self.num_output_tokens[request] += steps
        self.num_computed_tokens[request] += steps

    def num_tokens(self, request: int) -> int:
        """Prompt and output so far."""
        return self.num_prompt_tokens[request] + self.num_output_tokens[request]


@dataclass(frozen=True)
class ScheduledStep:
    """What a replica's next step computes.

    Attributes:
        decoding: requests that generate a token each.
        prefilling: (request, tokens of it that the step computes).
        context: tokens of the decoding requests in all.
        longest: the most tokens of a decoding request.
        least: tokens that the decoding request with fewest to come still generates.
        room: tokens whose KV fits besides.
    """

    decoding: list[int]
    prefilling: list[tuple[int, int]]
    context: int
    longest: int
    least: int
    room: float

    @property
    def prefill(self) -> int:
        """Prompt tokens of the step."""
        return sum(tokens for _, tokens in self.prefilling)

    def shape(self, steps: int, busy: int) -> StepShape:
        """The middle one of `steps` such steps, while `busy` replicas have work."""
        middle = (steps - 1) / 2
        batch = len(self.decoding)
        return StepShape(
            batch,
            self.context + int(batch * middle),
            self.longest + int(middle),
            self.prefill,
            busy,
        )


class _Steady:
    """Requests that only decode, all of them in each step. What they have in common is counted
    once, and written to the requests' columns when somebody looks.

    Attributes:
        context, longest: as in `ScheduledStep`, now.
        made: steps.
        written: those of them that the columns have.
    """

    def __init__(self, requests: SimulatedRequests, running: Sequence[int]) -> None:
        tokens = [requests.num_tokens(i) for i in running]
        self.context, self.longest, self.made = sum(tokens), max(tokens), 0
        self.written = 0
        lengths, outputs = requests.length, requests.num_output_tokens
        ends = [(lengths[i] - outputs[i], i) for i in running]
        self._by_end = sorted(ends, reverse=True)
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
            left = set(running)
            while self._by_tokens[-1][1] not in left:
                self._by_tokens.pop()
            self.longest = self._by_tokens[-1][0] + self.made
        return complete


@dataclass(slots=True)
class SimulatedReplica:
    """A replica, its requests by index, and the chunk of steps that it is making.

    Attributes:
        cached_prompts: groups whose prompt's KV is in memory.
        decoding, prefilling: of the chunk, as in `ScheduledStep`.
        steps: of the chunk; 0 between chunks.
        made: steps before the chunk, since the layout became active.
        began: when the chunk began.
        per_step: seconds of each of its steps, whose shape is `shape`.
        end: when the chunk is over; infinite between chunks.
        steady: what runs, for as long as nothing but decoding happens; None before.
    """

    index: int
    running: list[int] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    cached_prompts: set[int] = field(default_factory=set)
    decoding: list[int] = field(default_factory=list)
    prefilling: list[tuple[int, int]] = field(default_factory=list)
    steps: int = 0
    made: int = 0
    began: float = 0.0
    per_step: float = 0.0
    shape: StepShape = _NOTHING
    end: float = math.inf
    steady: _Steady | None = None

    @property
    def num_seqs(self) -> int:
        """Requests, waiting ones included."""
        return len(self.running) + len(self.waiting)

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
        made = (now - self.began) / self.per_step
        steps = max(1, math.ceil(made - _ROUNDING)) if started else math.floor(made + _ROUNDING)
        return min(steps, self.steps)

    def schedule(
        self, requests: SimulatedRequests, capacity: ReplicaCapacity, tp: int
    ) -> ScheduledStep:
        """Choose what the next step computes, and admit waiting requests to it.

        Raises:
            ValueError: a request does not fit into the replica's memory.
        """
        if steady := self._still_steady(requests, capacity.kv_room(tp)):
            room = capacity.kv_room(tp) - steady.context - len(self.running)
            return ScheduledStep(
                self.running, [], steady.context, steady.longest, steady.least, room
            )
        room = self._make_room(requests, capacity.kv_room(tp), tp)
        num_prompt_tokens, num_output_tokens = (
            requests.num_prompt_tokens,
            requests.num_output_tokens,
        )
        computed = requests.num_computed_tokens
        decoding: list[int] = []
        unfinished: list[tuple[int, int]] = []
        context = longest = 0
        for request in self.running:
            tokens = num_prompt_tokens[request] + num_output_tokens[request]
            if computed[request] < tokens:
                unfinished.append((request, tokens - computed[request]))
                continue
            decoding.append(request)
            context += tokens
            if tokens > longest:
                longest = tokens
        budget = capacity.most_tokens(tp) - len(decoding)
        prefilling: list[tuple[int, int]] = []
        for request, missing in unfinished:
            if budget > 0:
                prefilling.append((request, min(missing, budget)))
                budget -= min(missing, budget)
        most = capacity.most_seqs(tp)
        while self.waiting and len(self.running) < most and budget > 0:
            request = self.waiting[0]
            tokens = requests.num_tokens(request)
            group = requests.group[request]
            if not computed[request]:
                if tokens + 1 > room:
                    break
                room -= tokens + 1
                if group in self.cached_prompts and not num_output_tokens[request]:
                    computed[request] = tokens - 1  # the last token is computed in any case
            self.cached_prompts.add(group)
            self.running.append(self.waiting.popleft())
            if missing := tokens - computed[request]:
                prefilling.append((request, min(missing, budget)))
                budget -= min(missing, budget)
            else:
                decoding.append(request)
                context += tokens
                longest = max(longest, tokens)
                budget -= 1
                room -= 1
        if not decoding and not prefilling:
            raise _too_long(tp, requests.num_tokens(self.waiting[0]))
        least = min([requests.length[i] - num_output_tokens[i] for i in decoding], default=1)
        if not self.waiting and len(decoding) == len(self.running):
            self.steady = _Steady(requests, self.running)
            decoding = self.running
        return ScheduledStep(decoding, prefilling, context, longest, least, room)

    def _still_steady(self, requests: SimulatedRequests, room: float) -> _Steady | None:
        """What runs, where the next step also does nothing but decode it."""
        steady = self.steady
        if steady is not None and (
            self.waiting or not self.running or steady.context + len(self.running) > room
        ):
            self.write(requests)
            self.steady = None
        return self.steady

    def write(self, requests: SimulatedRequests) -> None:
        """Write the tokens that were counted in common."""
        if self.steady is not None:
            for request in self.running:
                requests.decode(request, self.steady.made - self.steady.written)
            self.steady.written = self.steady.made

    def finish(self, requests: SimulatedRequests, steps: int) -> list[int]:
        """`steps` steps of the chunk are over, and the chunk with them.

        Returns:
            The requests that have their length now; they have left the replica.
        """
        if self.steady is not None:
            self.made += steps
            self.set_steps(0)
            return self.steady.advance(requests, self.running, steps)
        outputs, computed = requests.num_output_tokens, requests.num_computed_tokens
        for request in self.decoding:
            requests.decode(request, steps)
        stepped = self.decoding
        for request, tokens in self.prefilling:
            requests.prefilled += tokens
            computed[request] += tokens
            if computed[request] == requests.num_tokens(request):
                outputs[request] += 1
                computed[request] += 1
                stepped = [*stepped, request]
        self.made += steps
        self.set_steps(0)
        complete = [i for i in stepped if outputs[i] >= requests.length[i]]
        for request in complete:
            self.running.remove(request)
        return complete

    def _make_room(self, requests: SimulatedRequests, room: float, tp: int) -> float:
        """Preempt, newest first, until every running request can take another token.

        Returns:
            Tokens that are free besides.
        """
        if room == math.inf:
            return room
        outputs, computed = requests.num_output_tokens, requests.num_computed_tokens
        while True:
            held = sum([computed[i] for i in self.waiting])
            # A request in prefill has its whole prompt reserved.
            used = sum([requests.num_prompt_tokens[i] + outputs[i] + 1 for i in self.running])
            if held + used <= room:
                return room - held - used
            if held:
                victim = next(i for i in reversed(self.waiting) if computed[i])
            elif len(self.running) > 1:
                victim = self.running.pop()
                self.waiting.appendleft(victim)
            else:
                raise _too_long(tp, used)
            computed[victim] = 0
            requests.preempted += 1


def _too_long(tp: int, tokens: int) -> ValueError:
    return ValueError(
        f"tp={tp}: a replica's memory cannot hold the KV of a request of {tokens} tokens; "
        "simulate with larger kv_tokens"
    )

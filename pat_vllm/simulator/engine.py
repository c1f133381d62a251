"""A model of an engine that serves a trace of response lengths. Pure.

A policy is driven as `PATScheduler` drives it, by a clock that is made up. Replicas run freely:
each has its own requests, its own queue and its own steps. Steps are advanced in chunks, which end
at a completion, at an arrival or after `chunk` steps, earlier when a layout is new; all steps of a
chunk take as long as the one in its middle, and a policy that learns is told of one of them.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import Policy
from pat_vllm.predictor.state import LiveRequests, LiveState
from pat_vllm.profiling.profile import Profile, StepShape
from pat_vllm.reporting import DecisionReport, LiveSample, SwitchReport
from pat_vllm.routing import Placed, Router, spread
from pat_vllm.simulator.run import SimulatedRun, SimulatedSteps
from pat_vllm.simulator.truth import Truth

if TYPE_CHECKING:
    from pat_vllm.simulator.traces import LengthTrace

CHUNK = 32
"""Most steps that a replica is advanced at once, and after which its policy is asked again."""
_ROUNDING = 1e-6
"""Part of a step that is rounding error when times are compared."""
_NOTHING = StepShape(0, 0, 0)


@dataclass(frozen=True)
class Limits:
    """What a replica can hold.

    Attributes:
        max_num_seqs: requests that it runs at once; the others wait.
        max_batch_tokens: tokens that one of its steps computes.
        kv_tokens: tokens whose KV it has memory for, by tp; unlimited where not named.
        kv_bytes_per_token: KV bytes of a token over all layers and KV heads.
    """

    max_num_seqs: int = 256
    max_batch_tokens: int = 8192
    kv_tokens: Mapping[int, int] = field(default_factory=dict)
    kv_bytes_per_token: int = 0

    @classmethod
    def of(cls, profile: Profile) -> Limits:
        """Those of a profile's engine."""
        return cls(
            profile.max_num_seqs,
            profile.max_batch_tokens,
            profile.kv_tokens,
            profile.kv_bytes_per_token,
        )


@dataclass(slots=True)
class _Replica:
    """A replica, its requests by index, and the steps that it is making."""

    index: int
    running: list[int] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    prompts: set[int] = field(default_factory=set)
    """Groups whose prompt's KV is in memory."""
    decoding: list[int] = field(default_factory=list)
    prefilling: list[tuple[int, int]] = field(default_factory=list)
    """(request, tokens of it that the step computes)"""
    steps: int = 0
    """Steps of the chunk; 0 between chunks."""
    made: int = 0
    """Steps before the chunk, since the layout became active."""
    began: float = 0.0
    per_step: float = 0.0
    shape: StepShape = _NOTHING

    @property
    def num_seqs(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def end(self) -> float:
        return self.began + self.steps * self.per_step if self.steps else math.inf

    def clone(self) -> _Replica:
        other = copy.copy(self)
        other.running, other.waiting = self.running[:], self.waiting.copy()
        other.prompts = set(self.prompts)
        # `decoding` and `prefilling` are replaced at the start of a chunk and never changed.
        return other


class SimulatedEngine:
    """State of a simulated engine. It reports to a policy, if it has one, but does not ask it."""

    def __init__(
        self,
        trace: LengthTrace,
        truth: Truth,
        limits: Limits,
        layout: Layout,
        began: float = 0.0,
        chunk: int = CHUNK,
        policy: Policy | None = None,
    ) -> None:
        """An idle engine in `layout`; see `simulate`."""
        self.now = began
        self.layout = layout
        self.num_seqs = 0
        self.done = 0
        self._began = began
        self._truth, self._limits, self._chunk, self._policy = truth, limits, chunk, policy
        self._prompt = [int(tokens) for tokens in trace.prompts]
        self._length = [int(tokens) for tokens in trace.lengths]
        self._group = [int(group) for group in trace.groups]
        self._bound = int(trace.bound)
        self._arrival = [began + float(at) for at in trace.arrivals]
        order = sorted(range(len(self._length)), key=self._arrival.__getitem__)
        self._arrivals = deque(order)
        self._last_arrival = began
        self._generated = [0] * len(order)
        self._kv = [0] * len(order)
        """Tokens whose KV is in memory; all of a request's context while it decodes."""
        self._finished = [math.nan] * len(order)
        self._replicas = [_Replica(index) for index in range(layout.replicas)]
        self._router = Router()
        self._switches: list[SwitchReport] = []
        self._timeline: list[LiveSample] = []
        self._steps: dict[Layout, tuple[int, float]] = {}
        self._prefilled = 0
        self._preempted = 0
        self._admit_arrivals()

    def clone(self) -> SimulatedEngine:
        """An independent copy, which reports to no policy."""
        other = copy.copy(self)
        other._policy = None
        other._arrivals = self._arrivals.copy()
        other._generated, other._kv = self._generated[:], self._kv[:]
        other._finished = self._finished[:]
        other._replicas = [replica.clone() for replica in self._replicas]
        if self._arrivals:
            other._router = copy.deepcopy(self._router)
        other._switches, other._timeline = self._switches[:], self._timeline[:]
        other._steps = dict(self._steps)
        return other

    # ---------------------------------------------------------------- looking

    @property
    def arriving(self) -> int:
        """Requests that have yet to arrive."""
        return len(self._arrivals)

    @property
    def ended(self) -> float:
        """When the last response so far ended."""
        return max((at for at in self._finished if not math.isnan(at)), default=self._began)

    def remaining(self) -> list[int]:
        """Tokens that each live request has yet to generate."""
        live = (i for r in self._replicas for i in (*r.running, *r.waiting))
        return [self._length[i] - self._generated[i] for i in live]

    def state(self) -> LiveState:
        """What a policy sees."""
        quiet = self.now - self._last_arrival
        return LiveState(self.now, self.layout, self.num_seqs, quiet, self._requests)

    def _requests(self) -> LiveRequests:
        rows: list[tuple[int, int, int, int]] = []
        for replica in self._replicas:
            made = self._steps_made(replica)
            new = dict.fromkeys(replica.decoding, made) if replica.steps else {}
            for request in (*replica.running, *replica.waiting):
                generated = self._generated[request] + new.get(request, 0)
                computed = self._kv[request] + new.get(request, 0)
                rows.append((request, generated, replica.index, computed))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        index = columns[0]
        prompt = np.array(self._prompt, dtype=np.int64)[index]
        group = np.array(self._group, dtype=np.int64)[index]
        bound = np.full(len(index), self._bound, dtype=np.int64)
        exact = np.zeros(len(index), dtype=bool)
        return LiveRequests(prompt, columns[1], bound, exact, group, columns[2], columns[3])

    def result(self, decisions: tuple[DecisionReport, ...] = ()) -> SimulatedRun:
        """The run so far."""
        return SimulatedRun(
            began=self._began,
            ended=self.ended,
            back=self.now,
            tokens=sum(self._generated),
            finished=tuple(self._finished),
            switches=tuple(self._switches),
            timeline=tuple(self._timeline),
            steps={layout: SimulatedSteps(*steps) for layout, steps in self._steps.items()},
            prefilled=self._prefilled,
            preempted=self._preempted,
            decisions=decisions,
        )

    # ---------------------------------------------------------------- time

    def advance(self) -> None:
        """Start a chunk in every replica that has work and none, and go to the next event."""
        busy = sum(1 for replica in self._replicas if replica.num_seqs)
        for replica in self._replicas:
            if not replica.steps and replica.num_seqs:
                self._start(replica, busy)
        first = min(self._replicas, key=lambda replica: replica.end)
        arrival = self._arrival[self._arrivals[0]] if self._arrivals else math.inf
        if arrival <= first.end:
            self.now = max(self.now, arrival)
        else:
            self.now = first.end
            # Steps that end together are all over before the next ones start.
            together = self.now + _ROUNDING * first.per_step
            over = [replica for replica in self._replicas if replica.end <= together]
            for replica in sorted(over, key=lambda replica: replica.end):
                self._finish(replica, replica.steps)
            if not all(replica.num_seqs for replica in over):
                # The others step faster from now on, where replicas share something.
                for replica in self._replicas:
                    replica.steps = self._steps_made(replica, started=True)
        self._admit_arrivals()

    def advance_to_completion(self) -> None:
        """Go on in this layout until another response has ended."""
        done = self.done
        while self.done == done and (self.num_seqs or self.arriving):
            self.advance()

    def switch(self, target: Layout, reason: str) -> None:
        """Let the steps in flight finish, and carry every live request to `target`."""
        at, source = self.now, self.layout
        self.drain()
        quiesce = self.now - at
        carried = [
            (self._kv[request] == 0, request, replica.index)
            for replica in self._replicas
            for request in (*replica.running, *replica.waiting)
        ]
        carried.sort(key=lambda one: one[0])  # those without KV queue behind
        placement = spread(
            [Placed(f"{i:09}", replica, self._context(i)) for _, i, replica in carried],
            source,
            target,
        )
        self.layout = target
        self._replicas = [_Replica(index) for index in range(target.replicas)]
        self._router.forget()
        room = [self._kv_room(target.tp)] * target.replicas
        migrated = tokens = recomputed = 0
        for waits, request, _ in carried:
            replica = self._replicas[placement[f"{request:09}"]]
            replica.waiting.append(request)
            if waits:
                continue
            if self._kv[request] <= room[replica.index]:
                room[replica.index] -= self._kv[request]
                migrated += 1
                tokens += self._kv[request]
            else:
                self._kv[request] = 0
                recomputed += 1
        fixed = self._truth.switch_seconds(source, target, 0, 0)
        seconds = self._truth.switch_seconds(source, target, migrated, tokens)
        self.now += seconds
        weights = min(fixed, seconds)
        report = SwitchReport(
            at=at,
            source=source,
            target=target,
            reason=reason,
            num_seqs=len(carried),
            migrated=migrated,
            recomputed=recomputed,
            kv_bytes=tokens * self._limits.kv_bytes_per_token,
            seconds=quiesce + seconds,
            quiesce=quiesce,
            plan=0.0,
            states=0.0,
            kv=seconds - weights,
            weights=weights,
            activate=0.0,
            rpc=0.0,
            finish=0.0,
            tokens=tokens,
        )
        self._switches.append(report)
        self._note()
        if self._policy is not None:
            self._policy.switched(report)
        self._admit_arrivals()

    def drain(self) -> None:
        """Finish the steps in flight."""
        stops = []
        for replica in self._replicas:
            if steps := self._steps_made(replica, started=True):
                stops.append((replica.began + steps * replica.per_step, steps, replica))
        stops.sort(key=lambda stop: stop[0])
        for end, steps, replica in stops:
            self.now = max(self.now, end)
            self._finish(replica, steps)

    def _steps_made(self, replica: _Replica, started: bool = False) -> int:
        """Steps of its chunk that a replica has finished by now, or has `started`."""
        if not replica.steps:
            return 0
        made = (self.now - replica.began) / replica.per_step
        steps = max(1, math.ceil(made - _ROUNDING)) if started else math.floor(made + _ROUNDING)
        return min(steps, replica.steps)

    # ---------------------------------------------------------------- requests

    def _context(self, request: int) -> int:
        return self._prompt[request] + self._generated[request]

    def _admit_arrivals(self) -> None:
        arrived = False
        while self._arrivals and self._arrival[self._arrivals[0]] <= self.now:
            request = self._arrivals.popleft()
            group = self._group[request]
            loads = [replica.num_seqs for replica in self._replicas]
            self._replicas[self._router.route([group], loads)].waiting.append(request)
            self.num_seqs += 1
            self._last_arrival = self.now
            arrived = True
            if self._policy is not None:
                self._policy.arrived(self.now, group)
        if arrived:
            self._note()

    def _note(self) -> None:
        last = self._timeline[-1] if self._timeline else None
        if last is None or (last.layout, last.num_seqs) != (self.layout, self.num_seqs):
            self._timeline.append(LiveSample(self.now, self.layout, self.num_seqs))

    def _kv_room(self, tp: int) -> float:
        return self._limits.kv_tokens.get(tp, math.inf)

    # ---------------------------------------------------------------- steps of a replica

    def _start(self, replica: _Replica, busy: int) -> None:
        """Decide which requests the next steps compute, how many steps, and how long they take."""
        room = self._make_room(replica)
        kv = self._kv
        decoding: list[int] = []
        unfinished: list[tuple[int, int]] = []
        context = longest = 0
        for request in replica.running:
            tokens = self._prompt[request] + self._generated[request]
            if kv[request] < tokens:
                unfinished.append((request, tokens - kv[request]))
                continue
            decoding.append(request)
            context += tokens
            if tokens > longest:
                longest = tokens
        budget = self._limits.max_batch_tokens - len(decoding)
        prefilling: list[tuple[int, int]] = []
        for request, missing in unfinished:
            if budget > 0:
                prefilling.append((request, min(missing, budget)))
                budget -= min(missing, budget)
        while replica.waiting and len(replica.running) < self._limits.max_num_seqs and budget > 0:
            request = replica.waiting[0]
            tokens = self._context(request)
            if not kv[request]:
                if tokens + 1 > room:
                    break
                room -= tokens + 1
                if self._group[request] in replica.prompts and not self._generated[request]:
                    kv[request] = tokens - 1  # the last token is computed in any case
            replica.prompts.add(self._group[request])
            replica.running.append(replica.waiting.popleft())
            if missing := tokens - kv[request]:
                prefilling.append((request, min(missing, budget)))
                budget -= min(missing, budget)
            else:
                decoding.append(request)
                context += tokens
                longest = max(longest, tokens)
                budget -= 1
                room -= 1
        if not decoding and not prefilling:
            raise ValueError(
                f"tp={self.layout.tp}: a replica's memory cannot hold the KV of a request of "
                f"{self._context(replica.waiting[0])} tokens; simulate with larger kv_tokens"
            )

        batch = len(decoding)
        prefill = sum(tokens for _, tokens in prefilling)
        steps = 1
        if not prefill:
            steps = min([self._length[i] - self._generated[i] for i in decoding])
            steps = min(steps, self._chunk)
            if self._policy is not None and self._policy.learns:
                # It may want to hear of the first steps in a layout one by one.
                steps = min(steps, max(1, replica.made // 4))
            elif self._policy is not None and not replica.made:
                # A switch lets steps finish, with which responses may end: ask again soon.
                steps = 1
            if room != math.inf:
                steps = max(1, min(steps, int(room) // batch + 1))

        def shape() -> StepShape:
            middle = (steps - 1) / 2
            return StepShape(
                batch, context + int(batch * middle), longest + int(middle), prefill, busy
            )

        replica.shape = shape()
        replica.per_step = self._truth.step_seconds(self.layout.tp, replica.shape, self.now)
        if steps > 1 and self._arrivals:
            until = (self._arrival[self._arrivals[0]] - self.now) / replica.per_step
            if until < steps:
                steps = max(1, math.ceil(until))
                replica.shape = shape()
                replica.per_step = self._truth.step_seconds(self.layout.tp, replica.shape, self.now)
        replica.decoding, replica.prefilling = decoding, prefilling
        replica.steps, replica.began = steps, self.now

    def _make_room(self, replica: _Replica) -> float:
        """Preempt, newest first, until every running request can take another token.

        Returns:
            Tokens that are free besides.
        """
        capacity = self._kv_room(self.layout.tp)
        if capacity == math.inf:
            return capacity
        while True:
            held = sum([self._kv[i] for i in replica.waiting])
            # A request in prefill has its whole prompt reserved.
            used = sum([self._prompt[i] + self._generated[i] + 1 for i in replica.running])
            if held + used <= capacity:
                return capacity - held - used
            if held:
                victim = next(i for i in reversed(replica.waiting) if self._kv[i])
            elif len(replica.running) > 1:
                victim = replica.running.pop()
                replica.waiting.appendleft(victim)
            else:
                raise ValueError(
                    f"tp={self.layout.tp}: a replica's memory cannot hold the KV of a request of "
                    f"{used} tokens; simulate with larger kv_tokens"
                )
            self._kv[victim] = 0
            self._preempted += 1

    def _finish(self, replica: _Replica, steps: int) -> None:
        """`steps` steps of the replica's chunk are over, and the chunk with them."""
        seconds = steps * replica.per_step
        ended = replica.began + seconds
        for request in replica.decoding:
            self._generated[request] += steps
            self._kv[request] += steps
        stepped = replica.decoding
        for request, tokens in replica.prefilling:
            self._prefilled += tokens
            self._kv[request] += tokens
            if self._kv[request] == self._context(request):
                self._generated[request] += 1
                self._kv[request] += 1
                stepped = [*stepped, request]
        replica.made += steps
        replica.steps = 0
        count, total = self._steps.get(self.layout, (0, 0.0))
        self._steps[self.layout] = (count + steps, total + seconds)
        if self._policy is not None and self._policy.learns:
            self._policy.stepped(ended, self.layout, replica.shape, replica.per_step)
        complete = [i for i in stepped if self._generated[i] >= self._length[i]]
        for request in complete:
            replica.running.remove(request)
            self.num_seqs -= 1
            self.done += 1
            self._finished[request] = ended
            if self._policy is not None:
                length = self._length[request]
                self._policy.finished(
                    ended, self._group[request], length, complete=length < self._bound
                )
        self._note()

"""A model of an engine that serves a trace of response lengths. Pure.

A policy is driven as `PATScheduler` drives it, by a clock that is made up. Replicas run freely:
each has its own requests, its own queue and its own steps. Steps are advanced in chunks, which end
at a completion, at an arrival or after `chunk` steps, earlier when a layout is new; all steps of a
chunk take as long as the one in its middle but for their noise, of which they have the mean. A
policy that learns is told of one of them, with the noise of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import DraftYield
from pat_vllm.predictor.policy import Policy
from pat_vllm.predictor.state import Ints, LiveRequests, LiveState
from pat_vllm.profile import Profile
from pat_vllm.reporting import LiveSample, SwitchReport
from pat_vllm.scheduler.routing import Router
from pat_vllm.simulator.carrying import carry
from pat_vllm.simulator.ground_truth import GroundTruth
from pat_vllm.simulator.simulated_replica import SimulatedReplica
from pat_vllm.simulator.simulated_report import SimulatedReport
from pat_vllm.simulator.simulated_requests import SimulatedRequests
from pat_vllm.simulator.traces import LengthTrace

CHUNK = 32
"""Most steps that a replica is advanced at once, and after which its policy is asked again."""

_TOLD_OF_DRAFTS = 8
"""Steps of a chunk of which a policy is told what drafts were accepted. An engine tells of as many
as the policy has time for."""

_NO_DRAFTS = np.zeros(0, np.int64)


@dataclass(frozen=True)
class SimulatedLiveRequests(LiveRequests):
    """With what no engine knows.

    Attributes:
        remaining: tokens that each response will still have, int64 [n].
        draft_yield: what draft lengths will give them until then.
    """

    remaining: Ints
    draft_yield: Callable[[Sequence[int]], DraftYield]


class SimulatedEngine:
    """State of a simulated engine. It reports to its policy, but does not ask it.

    Attributes:
        arriving: requests that have yet to arrive, those included that continue others.
    """

    def __init__(
        self,
        trace: LengthTrace,
        truth: GroundTruth,
        profile: Profile,
        policy: Policy,
        began: float = 0.0,
        chunk: int = CHUNK,
    ) -> None:
        """An idle engine in the policy's layout; see `simulate`."""
        self.now = began
        self.layout = policy.default_layout
        self.num_seqs = 0
        self._began = began
        self._truth, self._profile, self._chunk, self._policy = truth, profile, chunk, policy
        self._requests = SimulatedRequests(trace, began)
        self.arriving = len(self._requests)
        # Those whose time is known.
        self._arrivals = [
            (at, request) for request, at in enumerate(self._requests.arrival) if at < math.inf
        ]
        heapify(self._arrivals)
        self._last_arrival = began
        self._replicas = self._new_replicas()
        self._router = Router(block_size=1)
        self._switches: list[SwitchReport] = []
        self._timeline: list[LiveSample] = []
        self._admit_arrivals()

    # ---------------------------------------------------------------- looking

    @property
    def _next_arrival(self) -> float:
        """Infinite where it depends on the end of another request, or there is none."""
        return self._arrivals[0][0] if self._arrivals else math.inf

    def state(self) -> LiveState:
        """What a policy sees."""
        quiet = self.now - self._last_arrival
        return LiveState(self.now, self.layout, self.num_seqs, quiet, self._live_requests)

    def _new_replicas(self) -> list[SimulatedReplica]:
        return [
            SimulatedReplica(index, self._requests, self._profile, self.layout.tp)
            for index in range(self.layout.replicas)
        ]

    def _live_requests(self) -> SimulatedLiveRequests:
        requests, replicas = self._requests, self._replicas
        index = np.array([i for r in replicas for i in (*r.running, *r.waiting)], np.int64)
        counts = [replica.num_seqs for replica in replicas]
        # A chunk's tokens are counted when it ends; a policy sees those made by now.
        new_tokens = np.zeros(len(requests), np.int64)
        over = [replica.steps_made(self.now) for replica in replicas]
        for replica, steps in zip(replicas, over, strict=True):
            if steps:
                decoding, k = replica.scheduled.decoding, replica.scheduled.k
                new_tokens[decoding] = requests.tokens_in(decoding, steps, k)
        prompt, length, group = requests.columns[:, index]
        written = requests.num_output_tokens
        if any(replica.scheduled.k for replica in replicas):  # the last step may end a response
            new_tokens = np.minimum(new_tokens, requests.columns[1] - 1 - written)
        outputs = (written + new_tokens)[index]
        return SimulatedLiveRequests(
            prompt,
            outputs,
            requests.max_tokens[index],
            np.zeros(len(index), bool),
            group,
            index,
            np.repeat(
                [replica.made + steps for replica, steps in zip(replicas, over, strict=True)],
                counts,
            ),
            (requests.num_computed_tokens + new_tokens)[index],
            remaining=length - outputs,
            draft_yield=lambda lengths: requests.guesses.draft_yield(index, outputs, lengths),
        )

    def report(self) -> SimulatedReport:
        """The run so far."""
        switches = tuple(self._switches)
        first = switches[0].source if switches else self.layout
        return SimulatedReport(
            layout=self.layout,
            layouts=tuple(dict.fromkeys((first, *(switch.target for switch in switches)))),
            switches=switches,
            refused=(),
            timeline=tuple(self._timeline),
            predictor=self._policy.report(since=self._began),
            began=self._began,
            back=self.now,
            tokens=int(self._requests.num_output_tokens.sum()),
            finished=tuple(self._requests.finished),
            prefilled=self._requests.prefilled,
            preempted=self._requests.preempted,
        )

    # ---------------------------------------------------------------- time

    def wait(self) -> None:
        """Go to the next arrival, which is yet to be admitted. No request is left."""
        self.now = max(self.now, self._next_arrival)

    def advance(self) -> None:
        """Start a chunk in every replica that has work and none, and go to the next event."""
        busy = sum([replica.num_seqs > 0 for replica in self._replicas])
        for replica in self._replicas:
            if not replica.steps and replica.num_seqs:
                self._start(replica, busy)
        first = min(self._replicas, key=lambda replica: replica.end)
        if self._next_arrival <= first.end:
            self.now = max(self.now, self._next_arrival)
        else:
            self.now = first.end
            # Steps that end together are all over before the next ones start.
            together = self.now + first.rounding
            over = [replica for replica in self._replicas if replica.end <= together]
            for replica in sorted(over, key=lambda replica: replica.end):
                self._finish(replica, replica.steps)
            if not all(replica.num_seqs for replica in over):
                # The others step faster from now on, where replicas share something.
                for replica in self._replicas:
                    if replica.steps:
                        replica.set_steps(replica.steps_made(self.now, started=True))
        self._admit_arrivals()

    def switch(self, target: Layout, reason: str) -> None:
        """Let the steps in flight finish, and carry every live request to `target`; in traces with
        turns also the contexts of ended ones, as far as there is room."""
        at, source = self.now, self.layout
        self.drain()
        for replica in self._replicas:
            replica.forget_overwritten()
        quiesce = self.now - at
        self.layout = target
        old, self._replicas = self._replicas, self._new_replicas()
        self._router.forget()
        carried = carry(self._requests, old, self._replicas, source, target)
        fixed = self._truth.switch_seconds(source, target, 0, 0)
        seconds = self._truth.switch_seconds(
            source, target, carried.migrated, carried.tokens + carried.cached_tokens
        )
        self.now += seconds
        weights = min(fixed, seconds)
        moved = carried.cached_tokens + carried.tokens
        report = SwitchReport(
            at=at,
            source=source,
            target=target,
            reason=reason,
            num_seqs=carried.num_seqs,
            migrated=carried.migrated,
            recomputed=carried.recomputed,
            kv_bytes=moved * self._profile.kv_bytes_per_token,
            seconds=quiesce + seconds,
            quiesce=quiesce,
            kv=seconds - weights,
            weights=weights,
            tokens=carried.tokens,
            cached_tokens=carried.cached_tokens,
        )
        self._switches.append(report)
        self._note()
        self._policy.switched(report)
        self._admit_arrivals()

    def drain(self) -> None:
        """Finish the steps in flight."""
        stops = []
        for replica in self._replicas:
            if steps := replica.steps_made(self.now, started=True):
                stops.append((replica.began + steps * replica.per_step, steps, replica))
        stops.sort(key=lambda stop: stop[0])
        for end, steps, replica in stops:
            self.now = max(self.now, end)
            self._finish(replica, steps)

    # ---------------------------------------------------------------- requests

    def _admit_arrivals(self) -> None:
        arrived = False
        while self._next_arrival <= self.now:
            _, request = heappop(self._arrivals)
            self._replicas[self._route(request)].waiting.append(request)
            self.arriving -= 1
            self.num_seqs += 1
            self._last_arrival = self.now
            arrived = True
            self._policy.arrived(self.now)
        if arrived:
            self._note()

    def _route(self, request: int) -> int:
        requests, replicas = self._requests, self._replicas
        loads = [replica.num_seqs for replica in replicas]
        prefixes: list[object] = [requests.group[request]]
        if not requests.has_turns:
            return self._router.route(prefixes, loads)
        prefixes.append(("trajectory", int(requests.trajectory[request])))
        return self._router.route(
            prefixes, loads, [replica.cached(request) for replica in replicas]
        )

    def _note(self) -> None:
        last = self._timeline[-1] if self._timeline else None
        if last is None or (last.layout, last.num_seqs) != (self.layout, self.num_seqs):
            self._timeline.append(LiveSample(self.now, self.layout, self.num_seqs))

    # ---------------------------------------------------------------- steps of a replica

    def _start(self, replica: SimulatedReplica, busy: int) -> None:
        """Start a chunk: what it computes, how many steps it has, and how long they take."""
        # The first step in a layout has no drafts to verify.
        scheduled = replica.schedule(self._draft_length if replica.made else lambda batch: 0)
        steps = 1
        if not scheduled.prefilling:
            steps = min(scheduled.steps_to_first_end, self._chunk)
            if self._policy.learns:
                # It may want to hear of the first steps in a layout one by one.
                steps = min(steps, max(1, replica.made // 4))
            elif not replica.made:
                # A switch lets steps finish, with which responses may end: ask again soon.
                steps = 1
            tokens = len(scheduled.decoding) * (scheduled.k + 1)
            steps = max(1, min(steps, scheduled.free_tokens // tokens + 1))

        def set_pace() -> None:
            replica.shape = scheduled.shape(steps, busy)
            replica.per_step = self._truth.step_seconds(self.layout, replica.shape, self.now, steps)

        set_pace()
        if steps > 1 and self._arrivals:
            until = (self._next_arrival - self.now) / replica.per_step
            if until < steps:
                steps = max(1, math.ceil(until))
                set_pace()
        replica.began = self.now
        replica.set_steps(steps)

    def _draft_length(self, batch: int) -> int:
        """What the policy says for a step of so many requests."""
        schedule = self._policy.drafts.get(self.layout, ())
        return next((k for first, last, k in schedule if first <= batch <= last), 0)

    def _finish(self, replica: SimulatedReplica, steps: int) -> None:
        """`steps` steps of the replica's chunk are over, and the chunk with them."""
        ended = replica.began + steps * replica.per_step
        if self._policy.learns and replica.shape.batch:
            reported, k = min(steps, _TOLD_OF_DRAFTS), replica.scheduled.k
            # The requests are still what they were before the chunk.
            for accepted in replica.accepted(reported) if k else [_NO_DRAFTS] * reported:
                self._policy.verified(ended, k, replica.shape.batch, accepted)
        complete = replica.finish(steps)
        if self._policy.learns:
            seconds = self._truth.step_seconds(self.layout, replica.shape, replica.began)
            self._policy.stepped(ended, self.layout, replica.shape, seconds)
        for request in complete:
            self.num_seqs -= 1
            following = self._requests.end(request, ended)
            if following is not None:
                heappush(self._arrivals, (self._requests.arrival[following], following))
                self._stop_for(self._requests.arrival[following])
            length, most = self._requests.length[request], self._requests.max_tokens[request]
            self._policy.ended(ended, length, complete=bool(length < most))
        if complete:
            self._note()

    def _stop_for(self, arrival: float) -> None:
        """End chunks with the step in which a request arrives, as if its time had been known."""
        for replica in self._replicas:
            if replica.end > arrival and replica.steps:
                until = math.ceil((arrival - replica.began) / replica.per_step)
                replica.set_steps(max(1, until, replica.steps_made(self.now, started=True)))

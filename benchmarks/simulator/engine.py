"""A model of an engine that serves a trace of response lengths. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.ground_truth import GroundTruth
from benchmarks.simulator.replica import SimulatedReplica, SimulatedRequests
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.kv_transfer.placement import RequestPlacement, place_requests
from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import DraftYield
from pat_vllm.predictor.policy import Policy
from pat_vllm.predictor.state import Ints, LiveRequests, LiveState
from pat_vllm.profile import Profile
from pat_vllm.reporting import LiveSample, Report, SwitchReport
from pat_vllm.scheduler.routing import Router


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulatedReport(Report):
    """The report of a simulated engine for one trace, with what no engine knows.

    Times are in seconds on the simulator's clock. `layouts` are those that the engine was in, the
    first one first. `predictor` holds the decisions of this trace only. Steps and drafts are left
    out.

    Attributes:
        began: when the trace began.
        back: when the engine was in its default layout again, ready for its next batch.
        tokens: generated.
        finished: when each response ended, in the trace's order.
        prefilled: prompt tokens computed, those computed again included.
        preempted: how often a request lost its KV for want of memory.
    """

    began: float
    back: float
    tokens: int
    finished: tuple[float, ...]
    prefilled: int
    preempted: int

    @property
    def seconds(self) -> float:
        """From the first arrival until the engine is ready for its next batch."""
        return self.back - self.began

    @property
    def generation_seconds(self) -> float:
        """From the first arrival to the last response."""
        return max(self.finished) - self.began

    @property
    def switches_on_the_way(self) -> tuple[SwitchReport, ...]:
        """The switches that carried requests."""
        return tuple(switch for switch in self.switches if switch.reason != "idle")


@dataclass(frozen=True)
class SimulatedLiveRequests(LiveRequests):
    """With what no engine knows.

    Attributes:
        remaining: tokens that each response will still have, int64 [n].
        draft_yield: what draft lengths are expected to give them until then.
    """

    remaining: Ints
    draft_yield: Callable[[Sequence[int]], DraftYield]


class SimulatedEngine:
    """State of a simulated engine. It reports to its policy, but does not ask it.

    Attributes:
        now: seconds on its clock.
        num_seqs: unfinished requests.
        arriving: requests that have yet to arrive.
    """

    def __init__(
        self,
        trace: LengthTrace,
        truth: GroundTruth,
        profile: Profile,
        policy: Policy,
        began: float = 0.0,
    ) -> None:
        """An idle engine in the policy's layout; see `simulate`."""
        self.now = began
        self.layout = policy.default_layout
        self.num_seqs = 0
        self._began = self._last_arrival = began
        self._trace, self._truth, self._profile, self._policy = trace, truth, profile, policy
        self._requests = SimulatedRequests(trace, began)
        arrivals = self._requests.arrivals
        # The next one last.
        self.arriving = sorted(range(len(trace)), key=lambda i: (arrivals[i], i), reverse=True)
        self._replicas = self._new_replicas()
        self._router = Router(block_size=1)
        self._switches: list[SwitchReport] = []
        self._timeline: list[LiveSample] = []
        self._admit_arrivals()

    def _new_replicas(self) -> list[SimulatedReplica]:
        return [
            SimulatedReplica(index, self._requests, self._profile, self.layout.tp)
            for index in range(self.layout.replicas)
        ]

    # ---------------------------------------------------------------- looking

    def state(self) -> LiveState:
        """What a policy sees."""
        quiet = self.now - self._last_arrival
        return LiveState(self.now, self.layout, self.num_seqs, quiet, self._live_requests)

    def _live_requests(self) -> SimulatedLiveRequests:
        requests, replicas = self._requests, self._replicas
        live = np.array([i for r in replicas for i in (*r.running, *r.waiting)], np.int64)
        outputs = requests.outputs[live]
        return SimulatedLiveRequests(
            requests.prompt[live],
            outputs,
            np.full(len(live), self._trace.max_tokens),
            np.zeros(len(live), bool),
            requests.group[live],
            live,
            np.repeat([r.made for r in replicas], [r.num_seqs for r in replicas]),
            requests.computed[live],
            remaining=requests.length[live] - outputs,
            draft_yield=lambda lengths: requests.drafts.draft_yield(live, outputs, lengths),
        )

    def report(self) -> SimulatedReport:
        """The run so far."""
        switches, requests = tuple(self._switches), self._requests
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
            tokens=int(requests.outputs.sum()),
            finished=tuple(requests.finished),
            prefilled=requests.prefilled,
            preempted=requests.preempted,
        )

    def _note(self) -> None:
        last = self._timeline[-1] if self._timeline else None
        if last is None or (last.layout, last.num_seqs) != (self.layout, self.num_seqs):
            self._timeline.append(LiveSample(self.now, self.layout, self.num_seqs))

    # ---------------------------------------------------------------- time

    @property
    def next_arrival(self) -> float:
        """Infinite where no request arrives any more."""
        return self._requests.arrivals[self.arriving[-1]] if self.arriving else math.inf

    def advance(self) -> None:
        """Start a step in every replica that has work and none, and go to the next event."""
        busy = sum(replica.num_seqs > 0 for replica in self._replicas)
        for replica in self._replicas:
            if replica.step is None and replica.num_seqs:
                self._start(replica, busy)
        first = min(replica.end for replica in self._replicas)
        if self.next_arrival <= first:
            self.now = max(self.now, self.next_arrival)
        else:
            self.now = first
            # Steps that end together are all over before the next ones start.
            for replica in self._replicas:
                if replica.end == first:
                    self._finish(replica)
        self._admit_arrivals()

    def _start(self, replica: SimulatedReplica, busy: int) -> None:
        # The first step in a layout has no drafts to verify.
        step = replica.schedule(busy, self._draft_length if replica.made else lambda batch: 0)
        replica.seconds = self._truth.step_seconds(self.layout, step.shape, self.now)
        replica.end = self.now + replica.seconds

    def _draft_length(self, batch: int) -> int:
        """What the policy says for a step of so many requests."""
        schedule = self._policy.drafts.get(self.layout, ())
        return next((k for first, last, k in schedule if first <= batch <= last), 0)

    def _finish(self, replica: SimulatedReplica) -> None:
        step, ended, policy = replica.step, replica.end, self._policy
        assert step is not None
        if policy.learns and step.shape.batch:
            policy.verified(ended, step.shape.k, step.shape.batch, step.accepted)
        complete = replica.finish()
        if policy.learns:
            policy.stepped(ended, self.layout, step.shape, replica.seconds)
        for request in complete:
            self.num_seqs -= 1
            self._requests.finished[request] = ended
            length = int(self._requests.length[request])
            policy.ended(ended, length, complete=length < self._trace.max_tokens)
        if complete:
            self._note()

    def _admit_arrivals(self) -> None:
        if self.next_arrival > self.now:
            return
        while self.next_arrival <= self.now:
            request = self.arriving.pop()
            group: list[object] = [int(self._requests.group[request])]
            loads = [replica.num_seqs for replica in self._replicas]
            self._replicas[self._router.route(group, loads)].waiting.append(request)
            self.num_seqs += 1
            self._last_arrival = self.now
            self._policy.arrived(self.now)
        self._note()

    # ---------------------------------------------------------------- switches

    def switch(self, target: Layout, reason: str) -> None:
        """Let the steps in flight finish, and carry every live request to `target`."""
        at, source = self.now, self.layout
        for replica in sorted(self._replicas, key=lambda replica: replica.end):
            if replica.step is not None:
                self.now = replica.end
                self._finish(replica)
        quiesce = self.now - at
        self.layout = target
        old, self._replicas = self._replicas, self._new_replicas()
        self._router.forget()
        migrated, tokens, recomputed = carry(self._requests, old, self._replicas, source, target)
        fixed = self._truth.switch_seconds(source, target, 0, 0)
        seconds = self._truth.switch_seconds(source, target, migrated, tokens)
        self.now += seconds
        weights = min(fixed, seconds)
        report = SwitchReport(
            at=at,
            source=source,
            target=target,
            reason=reason,
            num_seqs=self.num_seqs,
            migrated=migrated,
            recomputed=recomputed,
            kv_bytes=tokens * self._profile.kv_bytes_per_token,
            seconds=quiesce + seconds,
            quiesce=quiesce,
            kv=seconds - weights,
            weights=weights,
            tokens=tokens,
        )
        self._switches.append(report)
        self._note()
        self._policy.switched(report)
        self._admit_arrivals()


def carry(
    requests: SimulatedRequests,
    replicas: Sequence[SimulatedReplica],
    new_replicas: Sequence[SimulatedReplica],
    source: Layout,
    target: Layout,
) -> tuple[int, int, int]:
    """Carry the live requests from replicas of layout `source` to those of layout `target`.

    Returns:
        Requests that took their KV along, the tokens of that, and requests that found no room.
    """
    computed = requests.computed
    live = [(i, replica) for replica in replicas for i in (*replica.running, *replica.waiting)]
    live.sort(key=lambda entry: computed[entry[0]] == 0)  # those without KV queue behind
    held = [
        RequestPlacement(f"{i:09}", replica.index, int(requests.tokens(i))) for i, replica in live
    ]
    placement = place_requests(held, source, target)
    room = [replica.room for replica in new_replicas]
    full: set[int] = set()
    migrated = tokens = recomputed = 0
    for i, _ in live:
        replica = new_replicas[placement[f"{i:09}"]]
        replica.waiting.append(i)
        needs = int(computed[i])
        if needs and needs <= room[replica.index] and replica.index not in full:
            room[replica.index] -= needs
            migrated += 1
            tokens += needs
        elif needs:
            # As in vLLM, which admits in order: nobody overtakes one that has to wait for room.
            full.add(replica.index)
            computed[i] = 0
            recomputed += 1
    return migrated, tokens, recomputed

"""Measures steps and switches of a real engine, with synthetic requests.

It runs in the engine core, while no request is live, and sends its steps as the engine does: down
the executor's lanes, a message queue for each replica. So its times include dispatch, collectives,
sampling, and whatever the replicas take from each other. A step's time is the time from one
finished step of a replica to its next.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput

from pat_vllm.executor.messages import PATSchedulerOutput, SwitchCommand
from pat_vllm.kv_transfer.placement import RequestPlacement, place_requests
from pat_vllm.kv_transfer.plan import RequestBlocks, plan_moves
from pat_vllm.layout import Layout
from pat_vllm.models.kinds import NULL_BLOCK
from pat_vllm.profile import StepSample, StepShape, SwitchSample
from pat_vllm.profiling import quality
from pat_vllm.profiling.grid import Plan, StepPoint, SwitchPoint, estimate
from pat_vllm.profiling.synthetic_steps import SyntheticSteps
from pat_vllm.worker.synthetic import (
    FIRST_BLOCK,
    SyntheticRequest,
    add_new,
    finish,
    make_requests,
    next_block,
)

if TYPE_CHECKING:
    from pat_vllm.executor.executor import PATExecutorMixin

_Allotted = dict[int, list[SyntheticRequest]]
"""Synthetic requests by replica."""
_LEAST_TIMES = 3
"""Number of step times, over all replicas, that a point gets even if its patience has ended."""
_SETTLED_TIMES = 5
"""Number of step times of each replica after which a point may have settled."""
_SETTLED_SPREAD = 0.05
"""A point has settled when the middle half of its times lies within this share of their median."""
_UNSETTLED = 2
"""Number of a replica's first steps whose times do not count: the first adds the requests, and the
second may still do work that the first has caused."""
_STEPS_OF_A_POINT = 5
"""Number of steps that an expensive point takes: `_UNSETTLED` and `_LEAST_TIMES`."""


class Profiler:
    """Measures the points of a plan, as far as its budget reaches.

    No request may be live and no step in flight. The KV memory is overwritten, so that no prefix
    cache may rest on it. Afterwards the workers are in the layout in which they were, know of no
    request, and their random sampling is seeded as after the switch number `switch_id`.

    Attributes:
        steps, switches: what was measured.
        skipped: number of points that were left out for want of time.
    """

    def __init__(
        self,
        executor: PATExecutorMixin,
        plan: Plan,
        seconds_to_make: Callable[[Layout], float],
        switch_id: int = 0,
    ) -> None:
        """`seconds_to_make`: seconds that making a layout's schedulers takes, part of a switch."""
        config = executor.vllm_config
        assert config.model_config is not None
        self._executor = executor
        self._plan = plan
        self._switch_id = switch_id
        self._use_v2 = config.use_v2_model_runner
        self._vocabulary = config.model_config.get_vocab_size()
        # Steps in flight of a replica, as in vLLM's engine loop.
        self._depth = 2 if config.scheduler_config.async_scheduling else 1
        self._seconds_to_make = functools.cache(seconds_to_make)
        self._numbers = itertools.count()
        self.steps: list[StepSample] = []
        self.switches: list[SwitchSample] = []
        self.skipped = 0

    def run(self) -> Profiler:
        """Measure; returns this object."""
        home, plan = self._executor.layout, self._plan
        started = time.perf_counter()
        # An engine in its caller's process may not have told the workers yet who finished last.
        self._go(home)
        for done, point in enumerate(plan.points):
            left = plan.budget - (time.perf_counter() - started)
            # Overtime is only for a profile that lacks points to be kept, and can still get them.
            if quality.becomes_complete(done - self.skipped, self.skipped, len(plan.points)):
                left += plan.overtime
            if (
                done >= plan.essential
                and _STEPS_OF_A_POINT * estimate(point, self.steps, self.switches) > left
            ):
                self.skipped += 1
            elif isinstance(point, StepPoint):
                self._measure_step(point, min(plan.patience, max(0.0, left)))
            else:
                self._measure_switch(point)
        self._go(home)
        return self

    def _prefix(self) -> str:
        """A beginning of request ids that was not used before."""
        return f"pat-profile-{next(self._numbers)}"

    # ---------------------------------------------------------------- steps

    def _measure_step(self, point: StepPoint, patience: float) -> None:
        """Measure a kind of step in `point.busy` replicas at once, for `patience` seconds or so."""
        self._enter(point.layout)
        streams = {
            replica: SyntheticSteps(
                point, self._plan.limits, self._prefix(), self._use_v2, self._vocabulary
            )
            for replica in range(point.busy)
        }
        times, sizes = self._cadence(streams, patience)
        if not times:
            return
        contexts, longest = zip(*sizes, strict=True)
        shape = StepShape(
            batch=point.batch,
            context=round(statistics.mean(contexts)),
            longest=round(statistics.mean(longest)),
            prefill=point.prefill,
            busy=point.busy,
            drafts=point.batch * point.drafts,
            k=point.k,
        )
        self.steps.append(StepSample.of(point.layout, shape, times))

    def _cadence(
        self, streams: dict[int, SyntheticSteps], patience: float
    ) -> tuple[list[float], list[tuple[int, int]]]:
        """Run the replicas' streams side by side until their step times suffice.

        Returns:
            The seconds of each step that counts, in the order in which they were measured, and for
            each the sum of its contexts and the longest of them, in tokens.
        """
        times: list[float] = []
        sizes: list[tuple[int, int]] = []
        counted = dict.fromkeys(streams, 0)
        finished_at: dict[int, float] = {}
        started = time.perf_counter()
        enough = False
        while True:
            ready = {
                replica: stream.next()
                for replica, stream in streams.items()
                if not enough and len(stream.in_flight) < self._depth
            }
            if not any(stream.in_flight for stream in streams.values()):
                break
            self._executor.execute_model(PATSchedulerOutput.of(ready, in_flight=True))
            pending = self._executor.sample_tokens(None, non_block=True)
            if ready and max(len(streams[replica].in_flight) for replica in ready) < self._depth:
                continue  # as vLLM's loop fills its queue before it waits
            # Results of whatever steps have finished, in any replica.
            results = pending.result()
            now = time.perf_counter()
            for result in results:
                replica = result.replica
                before = finished_at.get(replica)
                finished_at[replica] = now
                steps = streams[replica].finished(result.output)
                if steps > _UNSETTLED and before is not None and not enough:
                    times.append(now - before)
                    sizes.append(streams[replica].sizes[steps - 1])
                    counted[replica] += 1
            # All stop when one can make no more steps: without it the others would be faster.
            full = any(stream.full for stream in streams.values())
            fewest = min(counted.values())
            enough = enough or full or self._suffice(times, fewest, now - started, patience)
        self._send({replica: stream.end() for replica, stream in streams.items()})
        return times, sizes

    def _suffice(
        self, times: Sequence[float], fewest: int, elapsed: float, patience: float
    ) -> bool:
        """Whether to leave a point, after `elapsed` of `patience` seconds.

        Args:
            times: step times of all replicas.
            fewest: number of times of the replica that has the fewest.
        """
        if not fewest or len(times) < _LEAST_TIMES:
            return False
        if elapsed >= patience:
            return True
        if fewest < _SETTLED_TIMES:
            return False
        return quality.spread(times) <= _SETTLED_SPREAD

    def _send(self, steps: dict[int, SchedulerOutput]) -> None:
        """Run a step in some replicas and wait for it."""
        self._executor.execute_model(PATSchedulerOutput.of(steps, in_flight=False))
        self._executor.sample_tokens(None, non_block=True)
        self._executor.finished(wait_for_all=True)

    # ---------------------------------------------------------------- switches

    def _enter(self, layout: Layout) -> None:
        """Switch to a layout without requests; that is a measurement, too."""
        source = self._executor.layout
        if source != layout:
            self._timed_switch(source, layout, [], {}, {})

    def _go(self, layout: Layout) -> None:
        """Switch without a measurement: the workers forget all requests and are seeded as after the
        engine's own switch `switch_id`."""
        self._executor.switch(SwitchCommand(self._switch_id, self._executor.layout, layout))

    def _measure_switch(self, point: SwitchPoint) -> None:
        """Measure a switch that carries `point.num_seqs` requests, or none."""
        source, target = point.source, point.target
        self._enter(source)
        if not point.num_seqs:
            self._enter(target)
            return
        prefix = self._prefix()
        requests = [
            RequestPlacement(f"{prefix}-{i}", i % source.replicas, point.context)
            for i in range(point.num_seqs)
        ]
        before = self._allot(requests, {r.request_id: r.replica for r in requests}, source)
        after = self._allot(requests, place_requests(requests, source, target), target)
        # A step makes the requests known to the workers, whose state of them travels too.
        self._send(
            {
                replica: add_new(SchedulerOutput.make_empty(), of_replica, self._use_v2, 2)
                for replica, of_replica in before.items()
            }
        )
        self._timed_switch(source, target, requests, before, after)
        self._send({replica: finish(of_replica) for replica, of_replica in after.items()})

    def _timed_switch(
        self,
        source: Layout,
        target: Layout,
        requests: Sequence[RequestPlacement],
        before: _Allotted,
        after: _Allotted,
    ) -> None:
        """Carry requests over, with planning as in a real switch."""
        making = self._seconds_to_make(target)
        begun = time.perf_counter()
        placement = place_requests(requests, source, target)
        blocks = _request_blocks(before, after)
        moves = tuple(plan_moves(source, target, self._plan.limits.kinds, blocks))
        times = self._executor.switch(
            SwitchCommand(self._switch_id, source, target, moves, placement)
        )
        seconds = time.perf_counter() - begun + making
        self.switches.append(
            SwitchSample(
                source=source,
                target=target,
                num_seqs=len(requests),
                tokens=sum(r.context for r in requests),
                kv_bytes=sum(t.kv_bytes for t in times),
                seconds=seconds,
                kv=max(t.kv for t in times),
                weights=max(t.weights for t in times),
            )
        )

    def _allot(
        self, requests: Sequence[RequestPlacement], placement: Mapping[str, int], layout: Layout
    ) -> _Allotted:
        """Make synthetic requests that decode, each with KV blocks in its replica of `layout`."""
        limits = self._plan.limits
        allotted: _Allotted = {}
        for replica in sorted({*placement.values()}):
            placed = [r for r in requests if placement[r.request_id] == replica]
            synthetic = make_requests(
                "", [r.context for r in placed], 1, limits.kinds, decoding=True
            )
            assert next_block(synthetic) - FIRST_BLOCK <= limits.blocks[layout.tp]  # by the plan
            allotted[replica] = [
                replace(request, request_id=r.request_id)
                for request, r in zip(synthetic, placed, strict=True)
            ]
        return allotted


def _request_blocks(before: _Allotted, after: _Allotted) -> Iterator[RequestBlocks]:
    """Old and new blocks of each request, without the null ones, which come first."""
    target = {
        request.request_id: (replica, request)
        for replica, requests in after.items()
        for request in requests
    }
    for replica, requests in before.items():
        for request in requests:
            to, other = target[request.request_id]
            for group, (old, new) in enumerate(zip(request.blocks, other.blocks, strict=True)):
                held = slice(old.count(NULL_BLOCK), None)
                yield RequestBlocks(request.request_id, replica, old[held], to, new[held], group)

"""Tells listeners what happens in the engine: the policy, the report, metrics, drafts."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.v1.engine import FinishReason

from pat_vllm.scheduler.requests import (
    RequestTable,
    TrackedRequest,
    counted_drafts,
    step_shape,
    verified_drafts,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from pat_vllm.executor.executor import StepResult
    from pat_vllm.layout import Layout
    from pat_vllm.metrics.metric_updates import MetricUpdates
    from pat_vllm.predictor.policy import Policy
    from pat_vllm.profile import StepShape
    from pat_vllm.reporting import EngineHistory, RefusedSwitch, SwitchReport
    from pat_vllm.reporting.listener import EngineListener
    from pat_vllm.scheduler.draft_rows import DraftRows
    from pat_vllm.scheduler.replica import Replica


class Monitor:
    """Knows the unfinished requests, and tells all listeners of every event. `ReplicaSet` tells it
    of requests and steps, `LayoutController` of switches and batches.

    Attributes:
        policy: decides when to switch.
        history: what `pat_vllm.report` shows.
        requests: the unfinished requests.
        draft_rows: earlier responses to the same prompts, for drafts; `repeated` has the ids of
            requests whose prompt has some.
        metrics: what happened, for Prometheus; None where vLLM keeps no statistics.
        last_arrival, last_end: when a request arrived last, and when one ended last, seconds on
            the monotonic clock.
    """

    def __init__(
        self,
        policy: Policy,
        history: EngineHistory,
        requests: RequestTable,
        speculates: bool,
        draft_rows: DraftRows,
        metrics: MetricUpdates | None = None,
    ) -> None:
        self._speculates = speculates
        self.policy = policy
        self.history = history
        self.requests = requests
        self.draft_rows = draft_rows
        self.metrics = metrics
        self.last_arrival = self.last_end = 0.0
        self._draft_length: dict[int, int] = {}
        """By replica: the draft length of its last step, whose drafts its next one verifies."""

    @property
    def listeners(self) -> tuple[EngineListener, ...]:
        """All that hear of events, in this order; the policy comes last."""
        metrics = () if self.metrics is None else (self.metrics,)
        return (self.draft_rows, self.history, *metrics, self.policy)

    def arrived(self, request: Request, replica: Replica, group: int) -> None:
        """A request was routed to a replica. Requests of a `group` are samples of one prompt."""
        self.last_arrival = now = time.monotonic()
        self.requests.add(request, replica, group)
        self.draft_rows.add(request)
        repeated = request.request_id in self.draft_rows.repeated
        for listener in self.listeners:
            listener.arrived(now, repeated)

    def stepped(
        self, layout: Layout, replica: Replica, step: SchedulerOutput, busy: int, result: StepResult
    ) -> None:
        """A replica finished a step, while `busy` replicas had steps in flight."""
        now, shape = time.monotonic(), step_shape(step, busy)
        replica.decode_steps += shape.batch > 0
        if self._speculates and step.total_num_scheduled_tokens:
            self._tell_drafts(now, layout, replica, step, shape, result)
        # With asynchronous scheduling a step is sent while another runs.
        seconds = replica.cadence(now, result.seconds)
        for listener in self.listeners:
            listener.stepped(now, layout, shape, seconds)

    def _tell_drafts(
        self,
        now: float,
        layout: Layout,
        replica: Replica,
        step: SchedulerOutput,
        shape: StepShape,
        result: StepResult,
    ) -> None:
        """Tell how many of a step's drafts were accepted: all listeners for the whole step, those
        that learn from it also for each request, by whether its prompt has earlier responses."""
        counts = counted_drafts(step, result.output, self.draft_rows.repeated)
        for listener in self.listeners:
            listener.drafted(now, layout, replica.index, shape.k, counts)
        # This step verified the drafts that the step before has made.
        length = self._draft_length.get(replica.index, 0)
        self._draft_length[replica.index] = shape.k
        learners = [listener for listener in self.listeners if listener.learns]
        by_prompt = self._by_prompt(step, shape.batch) if learners and shape.batch else ()
        for repeated, count, requests in by_prompt:
            accepted, drafted = verified_drafts(step, result.output, requests)
            # `count` is an estimate, since ids include requests that still prefill.
            count = max(count, len(accepted))
            for listener in learners:
                listener.verified(now, length, count, accepted, repeated, drafted)

    def _by_prompt(
        self, step: SchedulerOutput, batch: int
    ) -> Iterator[tuple[bool, int, Container[str] | None]]:
        """The step's requests by whether there are earlier responses to their prompts.

        Yields:
            Whether there are, about how many of these requests decode, and their ids; None: all
            requests of the step.
        """
        ids = step.scheduled_cached_reqs.req_ids
        repeated = {request_id for request_id in ids if request_id in self.draft_rows.repeated}
        others = len(ids) - len(repeated)
        if repeated:
            yield True, max(0, batch - others), repeated if others else None
        if others:
            yield False, min(others, batch), {*ids} - repeated if repeated else None

    def ended(self, request_id: str, reason: FinishReason) -> TrackedRequest | None:
        """A request ended; returns what was known of it, or None when it is unknown."""
        tracked = self.requests.pop(request_id)
        if tracked is None:
            return None
        self.last_end, request = time.monotonic(), tracked.request
        self.draft_rows.remove(request, reason)
        complete = None if tracked.exact else self.requests.complete(tracked, reason)
        for listener in self.listeners:
            listener.ended(self.last_end, request.num_output_tokens, complete)
        return tracked

    def idle(self) -> None:
        """No request is left. More may come that belong to the same batch."""
        self._draft_length.clear()
        for listener in self.listeners:
            listener.idle(time.monotonic())

    def batch_over(self) -> None:
        """The batch is over: it is counted, and what was learnt in it is kept."""
        batch = self.history.end_batch()
        for listener in self.listeners:
            listener.batch_over(time.monotonic(), batch)

    def switched(self, report: SwitchReport, replicas: Sequence[Replica]) -> None:
        """The engine has switched; its requests are in `replicas` now."""
        self.requests.move(replicas)
        self._draft_length.clear()  # drafts were dropped
        for listener in self.listeners:
            listener.switched(report)

    def refused(self, refused: RefusedSwitch) -> None:
        """A switch was not made."""
        for listener in self.listeners:
            listener.refused(refused)

    def weights_changed(self) -> None:
        """The model's weights may be others than before."""
        for listener in self.listeners:
            listener.weights_changed()

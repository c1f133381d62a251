"""Tells the policy and the report what happens in the engine."""

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
    from pat_vllm.reporting import EngineHistory, RefusedSwitch, SwitchReport
    from pat_vllm.scheduler.draft_rows import DraftRows
    from pat_vllm.scheduler.replica import Replica


class Monitor:
    """Knows the unfinished requests. Every event reaches the policy and the history through it.

    Attributes:
        policy: decides when to switch.
        history: what `pat_vllm.report` shows.
        requests: the unfinished requests.
        draft_rows: earlier responses to the same prompts, for drafts; `repeated` has the ids of
            requests whose prompt has some.
        last_arrival, last_end: when a request arrived last, and when one ended last, seconds on
            the monotonic clock.
        metrics: what happened, for Prometheus; None where vLLM keeps no statistics.
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
        self.last_arrival = self.last_end = 0.0
        self.metrics = metrics
        self._draft_length: dict[int, int] = {}
        """By replica: the draft length of its last step, whose drafts its next one verifies."""

    def arrived(self, request: Request, replica: Replica, group: int) -> None:
        """A request was routed to a replica. Requests of a `group` are samples of one prompt."""
        self.last_arrival = time.monotonic()
        self.history.arrived(self.last_arrival, self.policy.control)
        self.requests.add(request, replica, group)
        self.draft_rows.arrived(request)
        self.policy.arrived(self.last_arrival, request.request_id in self.draft_rows.repeated)

    def stepped(
        self, layout: Layout, replica: Replica, step: SchedulerOutput, busy: int, result: StepResult
    ) -> None:
        """A replica finished a step, while `busy` replicas had steps in flight."""
        now = time.monotonic()
        # With asynchronous scheduling a step is sent while another runs.
        seconds = replica.cadence(now, result.seconds)
        length = step.num_spec_tokens_to_schedule if self._speculates else 0
        self.history.step(layout, seconds, length)
        if self._speculates and step.total_num_scheduled_tokens:
            counts = counted_drafts(step, result.output, self.draft_rows.repeated)
            self.history.drafts(now, layout, replica.index, length, counts)
            if self.metrics is not None:
                self.metrics.drafted(replica.index, length, counts)
        if self.policy.learns:
            self._teach(now, layout, replica, step, busy, result, seconds)

    def _teach(
        self,
        now: float,
        layout: Layout,
        replica: Replica,
        step: SchedulerOutput,
        busy: int,
        result: StepResult,
        seconds: float,
    ) -> None:
        """Give the policy a step's time and, for each kind of prompt, its accepted drafts."""
        shape = step_shape(step, busy)
        replica.decode_steps += shape.batch > 0
        if self._speculates and (shape.batch or shape.prefill):
            length = self._draft_length.get(replica.index, 0)
            self._draft_length[replica.index] = shape.k
            by_prompt = self._by_prompt(step, shape.batch) if shape.batch else ()
            for repeated, count, requests in by_prompt:
                accepted, drafted = verified_drafts(step, result.output, requests)
                # `count` is an estimate, since ids include requests that still prefill.
                count = max(count, len(accepted))
                self.policy.drafted(now, length, count, accepted, repeated, drafted)
        self.policy.stepped(now, layout, shape, seconds)

    def _by_prompt(
        self, step: SchedulerOutput, batch: int
    ) -> Iterator[tuple[bool, int, Container[str] | None]]:
        """The step's requests by whether there are earlier responses to their prompts.

        Yields:
            Whether there are, about how many of them decode, and their ids; None: all.
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
        self.history.ended(self.last_end, request.num_output_tokens)
        if not tracked.exact:  # a fixed length tells nothing about other requests
            complete = self.requests.complete(tracked, reason)
            self.policy.finished(self.last_end, request.num_output_tokens, complete)
        self.draft_rows.ended(request, reason)
        return tracked

    def idle(self) -> None:
        """No request is left. The batch may go on."""
        self._draft_length.clear()
        self.history.idle()
        self.policy.idle(time.monotonic())

    def batch_over(self) -> None:
        """The batch is over: it is counted, and what was learnt in it is kept."""
        batch = self.history.batch_over()
        self.draft_rows.save()
        self.policy.batch_over(time.monotonic())
        if batch is not None and self.metrics is not None:
            self.metrics.batch(batch)

    def switched(self, report: SwitchReport, replicas: Sequence[Replica]) -> None:
        """The engine has switched; its requests are in `replicas` now."""
        self.requests.move(replicas)
        self.draft_rows.moved()
        self._draft_length.clear()  # drafts were dropped
        self.history.switch(report)
        if self.metrics is not None:
            self.metrics.switched(report)
        self.policy.switched(report)

    def refused(self, refused: RefusedSwitch) -> None:
        """A switch was not made."""
        self.history.refused(refused)
        if self.metrics is not None:
            self.metrics.refused(refused)
        self.policy.refused(refused.at)

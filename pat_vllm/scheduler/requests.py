"""The unfinished requests of the engine: where each is, and what a policy may know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.engine import FinishReason

from pat_vllm.predictor.state import LiveRequests
from pat_vllm.profiling.profile import StepShape

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from pat_vllm.scheduler.replica import Replica


@dataclass(slots=True)
class Owned:
    """A request and its replica.

    Attributes:
        group: equal for samples of one prompt.
        bound: most tokens that its response can have.
        exact: whether it will have exactly that many.
    """

    request: Request
    replica: Replica
    group: int
    bound: int
    exact: bool


class LiveTable:
    """Requests by id."""

    def __init__(self, max_model_len: int, length_bound: int | None) -> None:
        """`length_bound` is assumed in place of each request's own `max_tokens`, if given."""
        self._max_model_len = max_model_len
        self._length_bound = length_bound
        self._owned: dict[str, Owned] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._owned)

    def owner(self, request_id: str) -> Replica | None:
        """The request's replica, or None when it is unknown."""
        owned = self._owned.get(request_id)
        return None if owned is None else owned.replica

    def add(self, request: Request, replica: Replica, group: int) -> Owned:
        """Enter a request; for `group`, see `Owned`."""
        params = request.sampling_params
        bound = self._max_model_len - request.num_prompt_tokens
        exact = False
        if self._length_bound is not None:
            bound = min(bound, self._length_bound)
        else:
            bound = min(bound, request.max_tokens)
            exact = params is not None and bool(
                params.ignore_eos and not params.stop and not params.stop_token_ids
            )
        owned = Owned(request, replica, group, max(1, bound), exact)
        self._owned[request.request_id] = owned
        return owned

    def pop(self, request_id: str) -> Owned | None:
        """Take a request out."""
        return self._owned.pop(request_id, None)

    def move(self, replicas: Sequence[Replica]) -> None:
        """After a switch: find each request in its new replica."""
        owned, self._owned = self._owned, {}
        for replica in replicas:
            for request_id in replica.scheduler.requests:
                one = self._owned[request_id] = owned[request_id]
                one.replica = replica

    def arrays(self) -> LiveRequests:
        """All of them, for a policy."""
        rows = [
            (
                one.request.num_prompt_tokens,
                one.request.num_output_tokens,
                one.bound,
                one.exact,
                one.group,
                one.replica.index,
                one.request.num_computed_tokens,
            )
            for one in self._owned.values()
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 7).T
        prompt, generated, bound, exact, group, replica, computed = columns
        return LiveRequests(
            prompt=prompt,
            generated=generated,
            # One that goes beyond an assumed bound is about to end.
            bound=np.maximum(bound, generated + 1),
            exact=exact.astype(bool),
            group=group,
            replica=replica,
            computed=computed,
        )

    def complete(self, one: Owned, reason: FinishReason) -> bool:
        """Whether a response came to its natural end.

        Under an assumed bound the request's own `max_tokens` stands for that.
        """
        if reason == FinishReason.LENGTH and self._length_bound is not None:
            return one.request.num_output_tokens < one.bound
        return reason == FinishReason.STOP


def step_shape(step: SchedulerOutput, busy: int) -> StepShape:
    """What a replica's step computes."""
    cached = step.scheduled_cached_reqs
    requests, tokens = len(step.num_scheduled_tokens), step.total_num_scheduled_tokens
    contexts = cached.num_computed_tokens
    if tokens == requests and not step.scheduled_new_reqs:  # one token each: nothing else is fast
        return StepShape(requests, sum(contexts) + requests, max(contexts, default=0) + 1, 0, busy)
    decoding = [
        context + 1
        for request_id, context in zip(cached.req_ids, contexts, strict=True)
        if step.num_scheduled_tokens[request_id] == 1
    ]
    return StepShape(
        len(decoding), sum(decoding), max(decoding, default=0), tokens - len(decoding), busy
    )

"""The unfinished requests of the engine: where each is, and what a policy may know of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.engine import FinishReason

from pat_vllm.predictor.state import Ints, LiveRequests
from pat_vllm.profile import StepShape
from pat_vllm.reporting import DraftCounts
from pat_vllm.scheduler.images import identifiers

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from pat_vllm.scheduler.replica import Replica


@dataclass(slots=True)
class TrackedRequest:
    """A request and its replica.

    Attributes:
        group: hash of the prompt, equal for samples of one prompt.
        max_tokens: most tokens that its response can have.
        exact: whether it will have exactly that many.
        number: how many requests the engine got before it.
    """

    request: Request
    replica: Replica
    group: int
    max_tokens: int
    exact: bool
    number: int


class RequestTable:
    """Requests by id."""

    def __init__(self, max_model_len: int, length_bound: int | None) -> None:
        """`length_bound`: the policy's option, tokens, in place of requests' own `max_tokens`."""
        self._max_model_len = max_model_len
        self._length_bound = length_bound
        self._tracked: dict[str, TrackedRequest] = {}
        self._entered = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._tracked)

    def replica_of(self, request_id: str) -> Replica | None:
        """The request's replica, or None when the request is unknown."""
        tracked = self._tracked.get(request_id)
        return None if tracked is None else tracked.replica

    def is_over(self, request_id: str) -> bool:
        """Whether a request is known, and vLLM has ended it."""
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.request.is_finished()

    def add(self, request: Request, replica: Replica, group: int) -> None:
        """Enter a request; for `group`, see `TrackedRequest`."""
        params = request.sampling_params
        max_tokens = self._max_model_len - request.num_prompt_tokens
        exact = False
        if self._length_bound is not None:
            max_tokens = min(max_tokens, self._length_bound)
        else:
            max_tokens = min(max_tokens, request.max_tokens)
            exact = params is not None and bool(
                params.ignore_eos and not params.stop and not params.stop_token_ids
            )
        self._tracked[request.request_id] = TrackedRequest(
            request, replica, group, max(1, max_tokens), exact, self._entered
        )
        self._entered += 1

    def pop(self, request_id: str) -> TrackedRequest | None:
        """Take a request out."""
        return self._tracked.pop(request_id, None)

    def move(self, replicas: Sequence[Replica]) -> None:
        """Find each request in its new replica, after a switch."""
        tracked, self._tracked = self._tracked, {}
        for replica in replicas:
            for request_id in replica.scheduler.requests:
                moved = self._tracked[request_id] = tracked[request_id]
                moved.replica = replica

    def arrays(self) -> LiveRequests:
        """All of them, for a policy."""
        tracked = [*self._tracked.values()]
        requests = [each.request for each in tracked]

        def column(values: Iterable[int]) -> Ints:
            return np.fromiter(values, np.int64, len(tracked))

        generated = column(request.num_output_tokens for request in requests)
        max_tokens = column(each.max_tokens for each in tracked)
        return LiveRequests(
            num_prompt_tokens=column(request.num_prompt_tokens for request in requests),
            num_output_tokens=generated,
            # A request that goes beyond an assumed bound is about to end.
            max_tokens=np.maximum(max_tokens, generated + 1),
            exact=np.array([each.exact for each in tracked], np.bool_),
            group=column(each.group for each in tracked),
            number=column(each.number for each in tracked),
            replica_steps=column(each.replica.decode_steps for each in tracked),
            num_computed_tokens=column(request.num_computed_tokens for request in requests),
        )

    def complete(self, tracked: TrackedRequest, reason: FinishReason) -> bool:
        """Whether a response came to its natural end.

        Under an assumed bound the request's own `max_tokens` stands for that.
        """
        if reason == FinishReason.LENGTH and self._length_bound is not None:
            return tracked.request.num_output_tokens < tracked.max_tokens
        return reason == FinishReason.STOP


def prompt_key(request: Request) -> int:
    """A hash of the whole prompt, equal for samples of one prompt."""
    embeds = request.prompt_embeds
    tokens: tuple[int | str, ...] = tuple(request.prompt_token_ids or ())
    if request.mm_features:
        tokens = (*tokens, *identifiers(request))
    if embeds is None:
        return hash(tokens)
    data = embeds.detach().cpu().contiguous().flatten()
    # NumPy lacks bfloat16, so the bytes are hashed.
    return hash((tokens, tuple(embeds.shape), data.view(torch.uint8).numpy().tobytes()))


def step_shape(step: SchedulerOutput, busy: int) -> StepShape:
    """What a replica's step computes, while `busy` replicas have steps in flight."""
    cached = step.scheduled_cached_reqs
    requests, tokens = len(step.num_scheduled_tokens), step.total_num_scheduled_tokens
    contexts = cached.num_computed_tokens
    drafts = sum(map(len, step.scheduled_spec_decode_tokens.values()))
    k = step.num_spec_tokens_to_schedule
    # Every request decodes one token, beside its drafts: no need to look at each request.
    if tokens == requests + drafts and not step.scheduled_new_reqs:
        total, longest = sum(contexts) + requests, max(contexts, default=0) + 1
        return StepShape(requests, total, longest, 0, busy, drafts, k)
    drafts_of = step.scheduled_spec_decode_tokens
    decoding = [
        context + 1
        for request_id, context in zip(cached.req_ids, contexts, strict=True)
        if step.num_scheduled_tokens[request_id] == 1 + len(drafts_of.get(request_id, ()))
    ]
    prefill = tokens - len(decoding) - drafts
    total, longest = sum(decoding), max(decoding, default=0)
    return StepShape(len(decoding), total, longest, prefill, busy, drafts, k)


def verified_drafts(
    step: SchedulerOutput, output: ModelRunnerOutput, among: Container[str] | None = None
) -> Ints:
    """Draft tokens of each request of a step that had some to verify: accepted, and all; int64
    [2, requests].

    Args:
        among: ids of the requests to look at; None: all.
    """
    generated, index = output.sampled_token_ids, output.req_id_to_index
    verified = [
        (len(generated[index[request_id]]) - 1, len(drafts))
        for request_id, drafts in step.scheduled_spec_decode_tokens.items()
        if drafts and request_id in index and (among is None or request_id in among)
    ]
    return np.array([counts for counts in verified if counts[0] >= 0], np.int64).reshape(-1, 2).T


def counted_drafts(
    step: SchedulerOutput, output: ModelRunnerOutput, repeated: Container[str]
) -> DraftCounts:
    """How many draft tokens a step verified and accepted.

    Args:
        repeated: ids of requests whose prompts have earlier responses; also counted apart.
    """
    drafts = step.scheduled_spec_decode_tokens
    drafted = sum(map(len, drafts.values()))
    if not drafted:
        return DraftCounts(0, 0)
    generated = output.sampled_token_ids
    # What a request generates beside the drafts that it accepts is one token, or none.
    accepted = sum(map(len, generated)) - sum(map(bool, generated))
    of_repeated = sum(
        len(tokens) for request_id, tokens in drafts.items() if request_id in repeated
    )
    right = int(verified_drafts(step, output, repeated)[0].sum()) if of_repeated else 0
    return DraftCounts(drafted, accepted, of_repeated, right)

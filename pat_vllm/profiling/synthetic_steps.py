"""The synthetic steps of one replica at a point, one after the other."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput

from pat_vllm.profiling.grid import EngineLimits, StepPoint
from pat_vllm.worker.synthetic import (
    SyntheticRequest,
    add_new,
    decode_step,
    finish,
    make_requests,
    next_block,
)

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput


class SyntheticSteps:
    """Steps as vLLM's scheduler would send them.

    At a point with a draft length k, each step asks the drafter for k draft tokens of each request.
    Where the point hits, each step but the first also verifies k of each. These are made up, for
    what a drafter finds depends on what the model has sampled: token 1 with Model Runner V1, and
    what its drafter filled the drafts up with in V2. How many are accepted is what verification
    says, and contexts grow by as much; it hardly changes a step's time. With hits contexts repeat
    one token, without hits their n-grams do not repeat. Should the model's text do so all the same,
    what is found is not verified.

    Attributes:
        in_flight: of each step in flight: drafts of each request that it verifies.
        sizes: of each step sent: tokens of the contexts, summed, and of the longest one, as
            `StepShape` has them.
    """

    def __init__(
        self, point: StepPoint, limits: EngineLimits, prefix: str, use_v2: bool, vocabulary: int
    ) -> None:
        self._point = point
        self._use_v2 = use_v2
        self._prefix = prefix
        self._kinds = limits.kinds
        self._prompts = limits.prompts(point.prefill)
        self._room = limits.room_for(point.drafts)
        self._decoding = make_requests(
            prefix,
            point.contexts,
            self._room + 1,
            limits.kinds,
            decoding=True,
            vocabulary=vocabulary if point.k and not point.hits else 0,
        )
        self._generated = {request.request_id: 0 for request in self._decoding}
        self.in_flight: deque[int] = deque()
        self._prefilled: list[SyntheticRequest] = []
        self._sent = 0
        self._results = 0
        self.sizes: list[tuple[int, int]] = []

    @property
    def full(self) -> bool:
        """Whether contexts may have no room for another step."""
        grown = max(self._generated.values(), default=self._sent)
        return grown + self._point.drafts > self._room

    def next(self) -> SchedulerOutput:
        """The next step: each request decodes, and new prompts are computed."""
        generated, drafts = list(self._generated.values()), 0
        if self._sent and self._decoding:
            drafts = self._point.drafts
            step = decode_step(self._decoding, generated, drafts)
        else:
            step = add_new(
                SchedulerOutput.make_empty(), self._decoding, self._use_v2, self._room + 2
            )
        contexts = [
            request.tokens + count for request, count in zip(self._decoding, generated, strict=True)
        ]
        self.sizes.append((sum(contexts), max(contexts, default=0)))
        # All that it may generate; what is refused is taken back when the step has finished.
        for request_id in self._generated:
            self._generated[request_id] += 1 + drafts
        self.in_flight.append(drafts)
        step.num_spec_tokens_to_schedule = self._point.k
        step.finished_req_ids = {request.request_id for request in self._prefilled}
        self._prefilled = make_requests(
            f"{self._prefix}-{self._sent}",
            self._prompts,
            1,
            self._kinds,
            decoding=False,
            # Prompts of one step after the other may have the same blocks.
            first_block=next_block(self._decoding),
        )
        add_new(step, self._prefilled, self._use_v2, max_tokens=2)
        self._sent += 1
        return step

    def finished(self, output: ModelRunnerOutput) -> int:
        """Count a finished step, and what it generated; returns how many steps there were."""
        if drafts := self.in_flight.popleft():
            for request_id, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
                if request_id in self._generated:
                    self._generated[request_id] -= 1 + drafts - len(sampled)
        self._results += 1
        return self._results

    def end(self) -> SchedulerOutput:
        """The step that makes the runner forget the requests."""
        return finish([*self._decoding, *self._prefilled])

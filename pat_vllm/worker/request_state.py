"""Handing requests from one vLLM model runner to another.

The schedulers send a resumed request's blocks and tokens with its first step, as after a
preemption. Only what a runner keeps to itself is handed over here. There is one implementation for
each of vLLM's model runners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
import torch.distributed as dist
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.patches.runners import (
    forget_sampled_tokens,
    is_v2,
    share_grammar_bitmask,
    share_penalty_counts,
)
from pat_vllm.worker.drafters import forget_texts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    from pat_vllm.worker.runtime import ModelRunner

RequestState = Any
"""One request's state in transit; made and read by the same implementation."""


class RequestStateTransfer(Protocol):
    """Takes request state out of a model runner and puts it into another of the same kind."""

    keeps_states: ClassVar[bool]
    """Whether there is any to take. The same on all ranks."""

    def take(self, runner: Any, request_ids: Iterable[str]) -> dict[str, RequestState]:
        """State of those of the requests that `runner` knows, picklable."""
        ...

    def restore(self, runner: Any, states: Mapping[str, RequestState]) -> None:
        """Prepare `runner` to resume these requests. It must not know them."""
        ...

    def clear(self, runner: Any) -> None:
        """Make `runner` forget every request."""
        ...

    def share(self, host: Any, runner: Any) -> None:
        """Have `runner` use large buffers of `host` instead of its own, as far as it needs them.

        Only one of them has requests at any time.
        """
        ...


def state_transfer_for(runner: ModelRunner) -> RequestStateTransfer:
    """The implementation for a runner."""
    return V2RequestStateTransfer() if is_v2(runner) else V1RequestStateTransfer()


def gather_states(
    state_transfer: RequestStateTransfer,
    runner: ModelRunner,
    command: SwitchCommand,
    rank: int,
    group: dist.ProcessGroup,
) -> dict[str, RequestState]:
    """State of the requests that a switch brings to this rank, by id. Collective over `group`.

    All ranks or none take part, so nothing that one rank alone knows may decide on that.

    Args:
        runner: that of the source layout on this rank.
        rank: the global rank.
        group: all ranks, over a CPU backend.
    """
    if not command.placement or not state_transfer.keeps_states:
        return {}
    taken: dict[str, RequestState] = {}
    if command.source.tp_rank_of(rank) == 0:
        taken = state_transfer.take(runner, command.placement)
    gathered: list[dict[str, RequestState]] = [{}] * command.source.world_size
    dist.all_gather_object(gathered, taken, group=group)
    replica = command.target.replica_of(rank)
    return {
        request_id: state
        for states in gathered
        for request_id, state in states.items()
        if command.placement[request_id] == replica
    }


def _finish(runner: ModelRunner, request_ids: set[str]) -> None:
    """Tell a runner, in vLLM's own way, that requests have finished."""
    if request_ids:
        step = SchedulerOutput.make_empty()
        step.finished_req_ids = request_ids
        runner.execute_model(step)


@dataclass(frozen=True)
class _V1State:
    """A `CachedRequestState` with token lists and generator in compact form."""

    state: dict[str, Any]
    prompt_token_ids: np.ndarray | None
    output_token_ids: np.ndarray
    generator_state: torch.Tensor | None
    num_prompt_logprobs: int | None


class V1RequestStateTransfer:
    """For `vllm.v1.worker.gpu_model_runner`: resumed requests are looked up in `requests`."""

    keeps_states: ClassVar[bool] = True

    _NEW = frozenset(
        {
            "prompt_token_ids",
            "output_token_ids",
            "generator",
            "block_ids",
            "num_computed_tokens",
            "prev_num_draft_len",
        }
    )
    """Fields of vLLM's state that are packed, or begin anew: drafts are dropped at a switch."""

    def take(self, runner: RunnerV1, request_ids: Iterable[str]) -> dict[str, _V1State]:
        states = {}
        for request_id in request_ids:
            state: CachedRequestState | None = runner.requests.get(request_id)
            if state is None:
                continue
            states[request_id] = _V1State(
                state={
                    field.name: getattr(state, field.name)
                    for field in fields(CachedRequestState)
                    if field.name not in self._NEW
                },
                prompt_token_ids=_pack(state.prompt_token_ids),
                output_token_ids=np.asarray(state.output_token_ids, dtype=np.int32),
                generator_state=state.generator.get_state() if state.generator else None,
                num_prompt_logprobs=runner.num_prompt_logprobs.get(request_id),
            )
        return states

    def restore(self, runner: RunnerV1, states: Mapping[str, _V1State]) -> None:
        for request_id, packed in states.items():
            generator = None
            if packed.generator_state is not None:
                generator = torch.Generator(device=runner.device)
                generator.set_state(packed.generator_state)
            prompt = packed.prompt_token_ids
            runner.requests[request_id] = CachedRequestState(
                **packed.state,
                prompt_token_ids=None if prompt is None else prompt.tolist(),
                output_token_ids=packed.output_token_ids.tolist(),
                generator=generator,
                block_ids=(),
                num_computed_tokens=0,
            )
            if packed.num_prompt_logprobs is not None:
                runner.num_prompt_logprobs[request_id] = packed.num_prompt_logprobs

    def clear(self, runner: RunnerV1) -> None:
        _finish(runner, set(runner.requests))
        forget_sampled_tokens(runner.input_batch)

    def share(self, host: RunnerV1, runner: RunnerV1) -> None:
        # Of "ngram_gpu", a row for each request, of which the host may have fewer. A runner without
        # requests takes them from the host when it gets some.
        if hasattr(host, "token_ids_gpu_tensor"):
            of_host, own = host.token_ids_gpu_tensor, runner.token_ids_gpu_tensor
            larger = max(of_host, own, key=len)
            host.token_ids_gpu_tensor = larger[: len(of_host)]
            runner.token_ids_gpu_tensor = larger[: len(own)]


def _pack(token_ids: list[int] | None) -> np.ndarray | None:
    return None if token_ids is None else np.asarray(token_ids, dtype=np.int32)


class V2RequestStateTransfer:
    """For `vllm.v1.worker.gpu.model_runner`: requests resume as new ones with their tokens.

    No state is carried. The scheduler sends all tokens, from which the runner rebuilds penalties
    and the like. Random numbers are a function of seed and position. A request without a seed draws
    a new one, which is the same on all ranks of its replica, because a switch seeds their
    generators alike. The prompt logprobs of a half-computed prompt cannot be rebuilt; the scheduler
    has such a prompt computed again.
    """

    keeps_states: ClassVar[bool] = False

    def take(self, runner: RunnerV2, request_ids: Iterable[str]) -> dict[str, None]:
        return {}

    def restore(self, runner: RunnerV2, states: Mapping[str, None]) -> None:
        return

    def clear(self, runner: RunnerV2) -> None:
        _finish(runner, set(runner.req_states.req_id_to_index))
        forget_texts(runner)

    def share(self, host: RunnerV2, runner: RunnerV2) -> None:
        share_penalty_counts(runner, host)
        share_grammar_bitmask(runner, host)

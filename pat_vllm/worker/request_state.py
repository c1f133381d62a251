"""Handing requests from one vLLM model runner to another.

The schedulers send a resumed request's blocks and tokens with its first step, as after a
preemption. Only what a runner keeps to itself is handed over here. There is one implementation for
each of vLLM's model runners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
import torch.distributed as dist
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.models.drafters import has_weights
from pat_vllm.patches.runners import (
    forget_sampled_tokens,
    is_v2,
    restore_added_rows,
    restore_written_rows,
    share_drafter_inputs,
    share_grammar_bitmask,
    share_image_embeddings,
    share_penalty_counts,
)
from pat_vllm.worker.drafters.install import forget_texts
from pat_vllm.worker.images import without_data
from pat_vllm.worker.linear_states import has_slots_for_drafts, settle
from pat_vllm.worker.logits_processors import CarriedState, Lists, Packed, is_users

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor.interface import AddedRequest
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    from pat_vllm.worker.runtime import ModelRunner

RequestState = Any
"""One request's state in transit; made and read by the same implementation."""


class RequestStateTransfer(Protocol):
    """Takes request state out of a model runner and puts it into another of the same kind."""

    keeps_states: bool
    """Whether there is any to take. The same on all ranks."""

    def watch(self, runner: Any) -> None:
        """Look at a runner that is complete, and has had no requests yet."""
        ...

    def settle(self, runner: Any, request_ids: Iterable[str]) -> None:
        """Have the KV cache of those of the requests that `runner` knows look as if no step had
        verified drafts of theirs. Every rank calls it, before anything moves."""
        ...

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
    processors: Sequence[Packed | None]


class V1RequestStateTransfer:
    """For `vllm.v1.worker.gpu_model_runner`: resumed requests are looked up in `requests`."""

    keeps_states = True

    _NEW: ClassVar[frozenset[str]] = frozenset(
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

    def __init__(self) -> None:
        self._carried: dict[int, list[CarriedState]] = {}

    def watch(self, runner: RunnerV1) -> None:
        batch = runner.input_batch
        carried = self._carried[id(runner)] = []
        processors: list[tuple[Any, str]] = [
            (p, "update_state") for p in batch.logitsprocs.all if is_users(p)
        ]
        if batch.thinking_budget_state_holder is not None:
            processors.append((batch.thinking_budget_state_holder, "sync_batch"))
        for processor, method in processors:
            state = CarriedState(processor, batch.max_num_reqs, runner.device)
            restore_added_rows(processor, method, partial(_restore_added, runner, state))
            carried.append(state)

    def settle(self, runner: RunnerV1, request_ids: Iterable[str]) -> None:
        return  # with drafts, linear attention is refused on V1

    def take(self, runner: RunnerV1, request_ids: Iterable[str]) -> dict[str, _V1State]:
        states = {}
        processors = self._carried.get(id(runner), ())
        rows = runner.input_batch.req_id_to_index if processors else {}
        for processor in processors:
            processor.look(rows.values())
        for request_id in request_ids:
            state: CachedRequestState | None = runner.requests.get(request_id)
            if state is None:
                continue
            states[request_id] = _V1State(
                state={
                    field.name: getattr(state, field.name)
                    for field in fields(CachedRequestState)
                    if field.name not in self._NEW
                }
                | {"mm_features": without_data(state.mm_features)},
                prompt_token_ids=_pack(state.prompt_token_ids),
                output_token_ids=np.asarray(state.output_token_ids, dtype=np.int32),
                generator_state=state.generator.get_state() if state.generator else None,
                num_prompt_logprobs=runner.num_prompt_logprobs.get(request_id),
                processors=[
                    processor.take(request_id, rows.get(request_id), _lists_of(state))
                    for processor in processors
                ],
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
            _wait(self._carried.get(id(runner), ()), request_id, packed.processors)

    def clear(self, runner: RunnerV1) -> None:
        _finish(runner, set(runner.requests))
        _forget(self._carried.get(id(runner), ()))
        forget_sampled_tokens(runner.input_batch)

    def share(self, host: RunnerV1, runner: RunnerV1) -> None:
        share_image_embeddings(runner, host)
        # The drafter "ngram_gpu" has a row in it for each request; `host` may have fewer rows. vLLM
        # fills a row from the CPU when a request comes, so nothing in it has to be carried.
        if hasattr(host, "token_ids_gpu_tensor"):
            of_host, own = host.token_ids_gpu_tensor, runner.token_ids_gpu_tensor
            larger = max(of_host, own, key=len)
            host.token_ids_gpu_tensor = larger[: len(of_host)]
            runner.token_ids_gpu_tensor = larger[: len(own)]
        if has_weights(runner.speculative_config):
            share_drafter_inputs(runner, host)


def _pack(token_ids: list[int] | None) -> np.ndarray | None:
    return None if token_ids is None else np.asarray(token_ids, dtype=np.int32)


def _lists_of(state: CachedRequestState) -> Lists:
    """The lists that logits processors of Model Runner V1 are given for a request."""
    return {"prompt": state.prompt_token_ids, "output": state.output_token_ids}


def _restore_added(
    runner: RunnerV1, state: CarriedState, added: Sequence[AddedRequest]
) -> Iterator[tuple[AddedRequest, Callable[[], object]]]:
    """Yield the added requests that another layout's runner had, each with what gives its row its
    state back."""
    if not state.waiting:
        return
    state.keep(runner.requests)
    by_list = {id(runner.requests[id_].output_token_ids): id_ for id_ in state.waiting}
    for request in added:
        row, _, _, output = request
        if (request_id := by_list.get(id(output))) is not None:
            lists = _lists_of(runner.requests[request_id])
            yield request, partial(state.restore, request_id, row, lists)


@dataclass(frozen=True)
class _V2State:
    """What the user's logits processors keep for a request."""

    processors: Sequence[Packed | None]


class V2RequestStateTransfer:
    """For `vllm.v1.worker.gpu.model_runner`: requests resume as new ones with their tokens.

    The scheduler sends all tokens, from which the runner rebuilds penalties, thinking budgets and
    the like. Random numbers are a function of seed and position. A request without a seed draws a
    new one, which is the same on all ranks of its replica, because a switch seeds their generators
    alike. The prompt logprobs of a half-computed prompt cannot be rebuilt; the scheduler has such a
    prompt computed again. Only what logits processors of the user's keep is carried.
    """

    def __init__(self) -> None:
        self.keeps_states = False
        self._settles = False
        self._carried: dict[int, list[CarriedState]] = {}

    def watch(self, runner: RunnerV2) -> None:
        self._settles = has_slots_for_drafts(runner)
        states, sampler = runner.req_states, runner.sampler
        # A model may bring a sampler of its own, which has none.
        processors = [p for p in getattr(sampler, "logits_processors", ()) if is_users(p)]
        carried = self._carried[id(runner)] = [
            CarriedState(p, states.max_num_reqs, runner.device, foreign=vars(states).values())
            for p in processors
        ]
        if carried:
            assert sampler is not None
            self.keeps_states = True
            restore_written_rows(sampler, partial(_restore_written, runner, carried))

    def settle(self, runner: RunnerV2, request_ids: Iterable[str]) -> None:
        if self._settles:
            settle(runner, request_ids)

    def take(self, runner: RunnerV2, request_ids: Iterable[str]) -> dict[str, _V2State]:
        carried, rows = self._carried.get(id(runner), ()), runner.req_states.req_id_to_index
        for state in carried:
            state.look()
        taken = {
            id_: [state.take(id_, rows.get(id_), {}) for state in carried] for id_ in request_ids
        }
        # A request of another replica has nothing here.
        return {id_: _V2State(packed) for id_, packed in taken.items() if any(packed)}

    def restore(self, runner: RunnerV2, states: Mapping[str, _V2State]) -> None:
        for request_id, packed in states.items():
            _wait(self._carried.get(id(runner), ()), request_id, packed.processors)

    def clear(self, runner: RunnerV2) -> None:
        _finish(runner, set(runner.req_states.req_id_to_index))
        _forget(self._carried.get(id(runner), ()))
        forget_texts(runner)

    def share(self, host: RunnerV2, runner: RunnerV2) -> None:
        share_penalty_counts(runner, host)
        share_grammar_bitmask(runner, host)
        share_image_embeddings(runner, host)


def _restore_written(
    runner: RunnerV2, carried: Sequence[CarriedState]
) -> list[Callable[[], object]]:
    """Give requests that have come from another layout's runner their rows' state back.

    Returns:
        What gives them tensors once more.
    """
    rows = runner.req_states.req_id_to_index
    arrived = [(s, id_) for s in carried for id_ in s.waiting.keys() & rows.keys()]
    return [state.restore(request_id, rows[request_id], {}) for state, request_id in arrived]


def _wait(
    carried: Sequence[CarriedState], request_id: str, processors: Sequence[Packed | None]
) -> None:
    for state, packed in zip(carried, processors, strict=True):
        if packed is not None:
            state.waiting[request_id] = packed


def _forget(carried: Sequence[CarriedState]) -> None:
    for state in carried:
        state.waiting.clear()

"""What PAT does to vLLM's model runners: their memory, and what they share, in the workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor.interface import MoveDirectionality

from pat_vllm.patches.replacing import replaced

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs
    from vllm.v1.sample.logits_processor.interface import AddedRequest, BatchUpdate
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1


def is_v2(runner: RunnerV1 | RunnerV2 | None) -> TypeIs[RunnerV2]:
    """Whether a model runner is a Model Runner V2."""
    return hasattr(runner, "req_states")


def report_weights_memory(runner: RunnerV1 | RunnerV2, num_bytes: int) -> None:
    """Have a model runner say that its weights take `num_bytes`.

    Without it: vLLM's worker sizes the KV cache by the weights of the active layout's runner, and
    the other layouts' copies find no memory. Missing seam: a worker with several model runners.
    """
    runner.model_memory_usage = num_bytes


@contextmanager
def graphs_measured_apart(runner: RunnerV1 | RunnerV2) -> Iterator[None]:
    """Inside, have a model runner say that its CUDA graphs take nothing.

    Without it: vLLM's worker measures each layout's graphs by themselves, in a pool that is thrown
    away, and their sum counts the memory that graphs of several layouts share once for each.
    Missing seam: a worker that measures a step's memory only.
    """
    runner.profile_cudagraph_memory = lambda: 0  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.profile_cudagraph_memory  # the method shows again


def one_graph_pool(pool: Any) -> AbstractContextManager[None]:
    """Inside, have whoever asks for a new pool of CUDA graphs get this one.

    Without it: see `graphs_measured_apart`. Missing seam: vLLM's measurement of graphs chooses the
    pool itself.

    Args:
        pool: what `torch.cuda.graph_pool_handle` returned. Some graph must live in it for longer.
    """
    import torch

    return replaced(torch.cuda, "graph_pool_handle", lambda: pool)


def capture_on(stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    """Inside, have vLLM capture CUDA graphs on this stream.

    Without it: each layout captures on a stream of its own. torch uses memory of a pool again on
    the stream only that it was allocated on, so layouts share none of it, and cuBLAS has a
    workspace for each stream. Missing seam: `graph_capture` that is given its stream.
    """
    import vllm.distributed.parallel_state as parallel_state

    original = parallel_state.GraphCaptureContext
    return replaced(parallel_state, "GraphCaptureContext", lambda _: original(stream))


def use_attention_workspace(workspace: torch.Tensor | None) -> AbstractContextManager[None]:
    """Inside, have new attention metadata builders use this workspace, if there is one.

    Without it: each layout's FlashInfer has a workspace of its own, of 394 MiB or more, and its
    latent attention one of up to 64 Ki tokens. vLLM shares FlashInfer's among the groups of a
    runner, whose attention writes to it in turn, as layouts do. Missing seam: a runner that is
    given a workspace.

    Args:
        workspace: of a layout with at least as many heads on a rank (`attention_workspace`).
    """
    from vllm.v1.worker.utils import AttentionGroup

    original = AttentionGroup.create_metadata_builders

    def create(group: Any, *args: Any, **options: Any) -> None:
        original(group, *args, **options)
        for builder in group.metadata_builders:
            if workspace is None:
                continue
            if hasattr(builder, "set_workspace_buffer"):
                builder.set_workspace_buffer(workspace)
            elif (own := _of_latents(builder)) is not None and len(own) <= len(workspace):
                builder.chunked_prefill_workspace = workspace[: len(own)]

    return replaced(AttentionGroup, "create_metadata_builders", create)


def attention_workspace(runner: RunnerV1 | RunnerV2) -> torch.Tensor | None:
    """The workspace of a runner's attention backend, if it has one. It comes with the KV cache."""
    for groups in getattr(runner, "attn_groups", ()):
        for group in groups:
            for builder in group.metadata_builders:
                # Of vLLM's own protocol between builders, which few backends take part in.
                get = getattr(builder, "_get_workspace_buffer", None)
                if get is not None:
                    return get()  # type: ignore[no-any-return]
                if (own := _of_latents(builder)) is not None:
                    return own
    return None


def _of_latents(builder: Any) -> torch.Tensor | None:
    """Where latent attention gathers earlier parts of prompts, [tokens, latent]."""
    return getattr(builder, "chunked_prefill_workspace", None)


def forget_sampled_tokens(batch: InputBatch) -> None:
    """Make the input batch of a Model Runner V1 forget the tokens that it sampled last.

    Without it: with asynchronous scheduling, the batch gives them to a request that comes back
    under the same id, and penalties and logits processors wait for their copies to the host.
    Missing seam: a runner that can be emptied.
    """
    batch.prev_sampled_token_ids = None
    batch.prev_req_id_to_index = None
    batch.sampled_token_ids_cpu = None
    batch.async_copy_ready_event = None


def token_ids_of(host: RunnerV1 | RunnerV2 | None) -> AbstractContextManager[None]:
    """Inside, have a new Model Runner V2 keep token ids where `host` does, if that is one, too.

    Without it: each layout pins `max_num_seqs * max_model_len * 4` bytes of host memory, which are
    gigabytes for long contexts, and torch keeps pinned memory that is freed. Only one layout has
    requests at any time, and a request begins by writing its tokens. Missing seam: a runner that
    takes given request states.

    Args:
        host: of the runners the one with the most requests.
    """
    if not is_v2(host):
        return nullcontext()
    import vllm.v1.worker.gpu.states as states

    shared = host.req_states.all_token_ids
    most_rows, columns = shared.gpu.shape
    make = states.StagedWriteTensor

    def take(size: int | tuple[int, ...], **options: Any) -> StagedWriteTensor:
        # The others of a request's states have one dimension.
        if isinstance(size, int) or size[1:] != (columns,) or size[0] > most_rows:
            return make(size, **options)
        first = copy.copy(shared)  # with the same list of writes to come
        first.gpu, first.num_rows = shared.gpu[: size[0]], size[0]
        return first

    return replaced(states, "StagedWriteTensor", take)


def input_embeddings_of(host: RunnerV1 | RunnerV2 | None) -> AbstractContextManager[None]:
    """Inside, have a new Model Runner V1 keep input embeddings where `host` does, if that is one.

    Without it: each layout takes `max_num_batched_tokens * hidden_size` elements of device memory
    and pins as much host memory, for embeddings that a step writes before it reads them. Missing
    seam: a runner that takes given buffers.

    Args:
        host: of the runners the one with the most tokens in a step.
    """
    if host is None or is_v2(host) or not hasattr(host, "inputs_embeds"):
        return nullcontext()
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    shared = host.inputs_embeds
    most_rows, columns = shared.cpu.shape
    original = GPUModelRunner._make_buffer

    def make(runner: RunnerV1, *size: int, **options: Any) -> CpuGpuBuffer:
        rows = runner.max_num_tokens
        same = size == (rows, columns) and options.get("dtype") == shared.cpu.dtype
        # Only of these there is no NumPy array.
        if not same or options.get("numpy", True) or rows > most_rows:
            return original(runner, *size, **options)
        first = copy.copy(shared)
        first.cpu, first.gpu = shared.cpu[:rows], shared.gpu[:rows]
        return first

    return replaced(GPUModelRunner, "_make_buffer", make)


def threefold_positions_in(
    kept: list[StagedWriteTensor], runner: RunnerV1 | RunnerV2, most_requests: int
) -> AbstractContextManager[None]:
    """Inside, have a Model Runner V2 that loads its model keep positions of M-RoPE where others do.

    Without it: see `token_ids_of`; of M-RoPE each layout pins three times as much. A request begins
    by writing its own. Missing seam: a runner that takes given request states.

    Args:
        kept: empty at first, then with what all share.
        most_requests: of the layout with the most.
    """
    if not is_v2(runner):
        return nullcontext()
    import vllm.v1.worker.gpu.mm.rope as rope

    make = rope.StagedWriteTensor

    def take(size: tuple[int, int], **options: Any) -> StagedWriteTensor:
        own, columns = size
        if not kept:
            each = own // runner.max_num_reqs
            kept.append(make((each * most_requests, columns), **options))
        first = copy.copy(kept[0])  # with the same list of writes to come
        first.gpu, first.num_rows = first.gpu[:own], own
        return first

    return replaced(rope, "StagedWriteTensor", take)


@contextmanager
def buffers_of(host: RunnerV1 | RunnerV2 | None) -> Iterator[None]:
    """Inside, have a new model runner share what `token_ids_of` and `input_embeddings_of` tell."""
    with token_ids_of(host), input_embeddings_of(host):
        yield


def share_penalty_counts(runner: RunnerV2, host: RunnerV2) -> None:
    """Have a Model Runner V2 use the first rows of the penalty counters of `host`.

    Without it: each layout keeps a counter for each token of the vocabulary and each request. Only
    one layout has requests at any time, and a request that has penalties begins by writing its
    own. Missing seam: a sampler that takes given counters.

    Args:
        host: has at least as many requests.
    """
    assert runner.sampler is not None and host.sampler is not None
    own, shared = runner.sampler.penalties_state, host.sampler.penalties_state
    rows = len(own.output_bin_counts)
    assert rows <= len(shared.output_bin_counts)
    own.output_bin_counts = shared.output_bin_counts[:rows]
    own.prompt_bin_mask = shared.prompt_bin_mask[:rows]


def share_drafter_inputs(runner: RunnerV1, host: RunnerV1) -> None:
    """Have the drafter of a Model Runner V1 use the first rows of the inputs of that of `host`.

    Without it: each layout takes twice `max_num_batched_tokens * hidden_size` elements of device
    memory, for hidden states and embeddings that a step writes before it reads them. Missing seam:
    a drafter that takes given buffers.

    Args:
        host: has at least as many tokens in a step.
    """
    own: Any = runner.drafter
    shared: Any = host.drafter
    for name in ("hidden_states", "inputs_embeds"):
        rows = len(getattr(own, name))
        assert rows <= len(getattr(shared, name))
        setattr(own, name, getattr(shared, name)[:rows])


def share_grammar_bitmask(runner: RunnerV2, host: RunnerV2) -> None:
    """Have a Model Runner V2 use the grammar bitmask of `host`.

    Without it: each layout keeps a bit for each token of the vocabulary, each request and each
    token that it may get in a step, hundreds of MB with drafts. A step writes what it reads.
    Missing seam: a runner that takes given buffers.

    Args:
        host: has at least as many requests.
    """
    own, shared = runner.structured_outputs_worker, host.structured_outputs_worker
    if own is not None and shared is not None:
        rows = len(own.grammar_bitmask)
        assert rows <= len(shared.grammar_bitmask)
        own.grammar_bitmask = shared.grammar_bitmask[:rows]


def share_image_embeddings(runner: RunnerV1 | RunnerV2, host: RunnerV1 | RunnerV2) -> None:
    """Have two model runners of a class that takes images keep a step's embeddings in one place.

    Without it: each layout takes `max_num_batched_tokens * hidden_size` elements for what a Model
    Runner V2 is given, and as many for each level of deepstack. Only one layout steps at any time:
    it writes what it is given, and leaves deepstack's zero, as text finds it. Missing seam: a
    runner and a model that take given buffers.
    """

    def holders(of: Any) -> list[tuple[Any, Any]]:
        levels = getattr(of.get_model(), "deepstack_input_embeds", ())
        encoder = getattr(getattr(of, "model_state", None), "encoder_runner", None)
        inputs = [] if encoder is None else [(vars(encoder), "inputs_embeds")]
        return [*((levels, level) for level in range(len(levels))), *inputs]

    for (own, key), (shared, _) in zip(holders(runner), holders(host), strict=True):
        larger = max(own[key], shared[key], key=len)
        own[key], shared[key] = larger[: len(own[key])], larger[: len(shared[key])]


def restore_added_rows(
    processor: Any,
    method: str,
    carried: Callable[
        [Sequence[AddedRequest]], Iterable[tuple[AddedRequest, Callable[[], object]]]
    ],
) -> None:
    """Have a logits processor of a Model Runner V1 get the state of rows that others had.

    Without it: a request that comes from another layout's runner begins anew in it, in the middle
    of a phrase that it forces. Missing seam: a batch update that brings a row's state.

    Args:
        method: its method that takes batch updates.
        carried: says which of the added requests come from another runner, and what is to be called
            when the processor knows them.
    """
    update = getattr(processor, method)

    def update_in_two(batch_update: BatchUpdate | None) -> None:
        restores = list(carried(batch_update.added)) if batch_update is not None else []
        if batch_update is None or not restores:
            update(batch_update)
            return
        arrived = [request for request, _ in restores]
        update(replace(batch_update, added=arrived, moved=[]))
        for _, restore in restores:
            restore()
        known = set(map(id, arrived))
        added = [request for request in batch_update.added if id(request) not in known]
        moved = [*batch_update.moved]
        if len(arrived) > 1:
            # Two rows change places and back: what follows from rows is computed again.
            swap = (arrived[0][0], arrived[1][0], MoveDirectionality.SWAP)
            moved = [swap, swap, *moved]
        update(replace(batch_update, removed=[], added=added, moved=moved))

    setattr(processor, method, update_in_two)


def restore_written_rows(
    sampler: Sampler, restore: Callable[[], Iterable[Callable[[], object]]]
) -> None:
    """Have a Model Runner V2 call `restore` when its logits processors know of new requests.

    Without it: see `restore_added_rows`. Missing seam: a logits processor that is given a state.

    Args:
        restore: returns what is to be called when they have written to the device, which may
            overwrite what was restored there.
    """
    apply = sampler.apply_staged_writes

    def restore_and_apply() -> None:
        again = restore()
        apply()
        for restore_on_device in again:
            restore_on_device()

    sampler.apply_staged_writes = restore_and_apply  # type: ignore[method-assign]

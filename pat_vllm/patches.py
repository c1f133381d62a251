"""Everything that PAT does to vLLM's objects from outside.

Each patch is a function or a context manager. Its docstring says what breaks without it, and which
seam vLLM lacks. To apply a patch twice does no harm. A replaced method keeps the original as
`__wrapped__`; a context manager restores what it replaced. The module is long, because all that is
done to vLLM should be found in one place.

Not here, because vLLM offers a seam for it: PAT's executor, workers, scheduler, connector and
model loaders are subclasses; `support.py` names them in an engine's config;
`worker/layout_config.py` changes copies of that config; `kv_transfer/kv_buffer.py` answers an
allocation inside a context that vLLM enters. Nor here: the state of the requests that a switch
carries, which `scheduler/switch.py` and `worker/handover.py` write.

The vLLM plugin imports this module in each of vLLM's processes, whether they use PAT or not. So it
imports neither vLLM nor torch before a patch is applied.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.entrypoints.llm import LLM
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

_PATCHED = "_pat_patch"
"""Attribute that marks a replaced method."""


def _replace(
    owner: Any, name: str, wrap: Callable[[Any], Callable[..., Any]], static: bool = False
) -> None:
    """Replace `owner.name` by `wrap(original)`, unless that was done before."""
    original = getattr(owner, name)
    if getattr(original, _PATCHED, False):
        return
    inner = wrap(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    setattr(replacement, _PATCHED, True)
    setattr(owner, name, staticmethod(replacement) if static else replacement)


# -------------------------------------------------------------------- front end


def patch_get_class(executor: type, resolve: Callable[[Any, Callable[[Any], type]], type]) -> None:
    """Have `Executor.get_class` call `resolve(vllm_config, original)`.

    Without it: vLLM takes the bare name "pat" for a dotted path and fails to import it, and nothing
    sets `worker_cls` and `scheduler_cls`, which belong to the executor. vLLM calls the method with
    each `VllmConfig` it builds, in the front end, before any worker starts. That makes it also the
    place to refuse what PAT cannot do. Missing seam: a registry of executor backends.
    """

    def wrap(original: Callable[[Any], type]) -> Callable[[Any], type]:
        return lambda vllm_config: resolve(vllm_config, original)

    _replace(executor, "get_class", wrap, static=True)


def log_through_vllm() -> None:
    """Make PAT's loggers children of vLLM's.

    Without it: PAT's lines below WARNING are lost, for vLLM sets up handlers and level for the
    loggers below its own only. Missing seam: a logger for plugins.
    """
    logging.getLogger("pat_vllm").parent = logging.getLogger("vllm")


def serialize_sends(llm: LLM) -> None:
    """Put a lock around the sends of an `LLM`'s client.

    Without it: two threads write to one ZMQ socket, which is not made for that. vLLM's synchronous
    client is made for one thread. `generate` runs in that one, and may abort requests just when
    another thread asks for a switch. Missing seam: a client that several threads may use.
    """
    client = llm.llm_engine.engine_core
    if not hasattr(client, "_send_input"):
        return  # the engine runs in this process
    lock = threading.Lock()

    def wrap(send: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return send(*args, **kwargs)

        return locked

    _replace(client, "_send_input", wrap)


def fail_waits_for_a_dead_core() -> None:
    """Have a client of an engine core that died fail whoever waits for it.

    Without it: when the core is killed, by the kernel for want of memory for example,
    `LLM.generate` and calls that wait for an answer never return. The client's monitor sees the
    death and shuts the client down, which ends the thread that reads answers, but tells nobody.
    Missing seam: a callback of the monitor.
    """
    from vllm.v1.engine.core_client import MPClient, SyncMPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    def fail_asyncio(future: asyncio.Future[Any]) -> None:
        if not future.done():
            future.set_exception(EngineDeadError())

    def fail(client: MPClient) -> None:
        for future in list(client.utility_results.values()):
            if isinstance(future, Future):
                with suppress(InvalidStateError):
                    future.set_exception(EngineDeadError())
            else:
                with suppress(RuntimeError):  # its event loop is closed
                    future.get_loop().call_soon_threadsafe(fail_asyncio, future)
        if isinstance(client, SyncMPClient):
            client.outputs_queue.put_nowait(EngineDeadError())

    def wrap(shutdown: Callable[..., None]) -> Callable[..., None]:
        def shut_down(self: MPClient, timeout: float | None = None) -> None:
            try:
                shutdown(self, timeout)
            finally:
                fail(self)

        return shut_down

    _replace(MPClient, "shutdown", wrap)


_RAY_ADDRESS = "_pat_ray_address"


def note_ray_address(parallel: ParallelConfig, address: str) -> None:
    """Note the address of the Ray cluster in which an engine is configured, in its config.

    Without it: an engine core in a process of its own may join another cluster. vLLM passes the
    cluster on by an environment variable, from a Ray actor only, and not when
    VLLM_WORKER_MULTIPROC_METHOD=spawn is set. Missing seam: a field of `ParallelConfig` for it.
    The attribute is not part of the config's hash.
    """
    setattr(parallel, _RAY_ADDRESS, address)


def noted_ray_address(parallel: ParallelConfig) -> str | None:
    """What `note_ray_address` noted; None: the engine was not configured inside a cluster."""
    return getattr(parallel, _RAY_ADDRESS, None)


# -------------------------------------------------------------------- schedulers


@contextmanager
def block_pools_from(take: Callable[..., BlockPool]) -> Iterator[None]:
    """Inside, have new schedulers call `take` where they make a `BlockPool`.

    Without it: a switch makes an object for each KV block, which on eight large GPUs takes longer
    than all the rest of the switch. Missing seam: a scheduler that takes a given pool.
    """
    from vllm.v1.core import kv_cache_coordinator

    previous = kv_cache_coordinator.BlockPool
    kv_cache_coordinator.BlockPool = take  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        kv_cache_coordinator.BlockPool = previous  # type: ignore[misc]


@contextmanager
def linear_time_admission(scheduler: Scheduler) -> Iterator[None]:
    """Inside, the first `schedule()` of a new scheduler admits loads in linear time.

    Without it: a switch that carries many requests takes time that is quadratic in their number.
    For each load that vLLM admits, it counts what all loads in flight will still need. Nothing but
    admissions happens inside, so each load is counted once, and is kept out of vLLM's set until
    the end. vLLM also looks at each block for a cached prefix; the pool is empty, so it has none.
    Missing seam: admission of a batch of loads.
    """
    if "_inflight_prefill_reserved_blocks" in vars(scheduler):
        yield
        return
    counted: set[Request] = set()
    blocks = 0

    def reserved_blocks() -> int:
        nonlocal blocks
        new = scheduler._inflight_prefills
        blocks += sum(map(scheduler._request_remaining_blocks, new))
        counted.update(new)
        new.clear()
        return blocks

    pool = scheduler.kv_cache_manager.block_pool
    caching = pool.enable_caching
    scheduler._inflight_prefill_reserved_blocks = reserved_blocks  # type: ignore[method-assign]
    pool.enable_caching = False
    try:
        yield
    finally:
        pool.enable_caching = caching
        del scheduler._inflight_prefill_reserved_blocks
        scheduler._inflight_prefills.update(counted)


def free_blocks_at_once(scheduler: Scheduler) -> None:
    """Have a scheduler free the blocks of a preempted request without delay.

    Without it: with a KV connector and asynchronous scheduling, vLLM keeps these blocks until the
    step in flight has ended, lest a load overtakes it; requests are preempted otherwise than
    without a connector. PAT loads at a switch only, when no step is in flight. Missing seam: a
    connector cannot say so.
    """
    scheduler.defer_block_free = False


def make_room_for_grammars(manager: StructuredOutputManager, max_num_seqs: int) -> None:
    """Have vLLM's manager of grammars, as it starts, prepare for so many requests in a step.

    Without it: it has bitmasks for the engine's `max_num_seqs`. A step of a layout that runs more
    requests with structured output fails. Missing seam: a manager that is told the number.
    """
    config = manager.vllm_config
    if max_num_seqs <= config.scheduler_config.max_num_seqs:
        return
    config = copy.copy(config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_seqs = max_num_seqs
    manager.__init__(config)  # type: ignore[misc]


def preempt_carried(scheduler: Scheduler) -> None:
    """Preempt requests that have not run since a switch carried their KV to this scheduler.

    Without it: vLLM cannot reset its prefix cache. It preempts running requests only, and takes
    these for a load that may still write to their blocks. Missing seam: preemption of a request
    whose load has finished.
    """
    from vllm.v1.request import RequestStatus

    for request in reversed(list(scheduler.kv_holding_waiting)):
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            continue
        scheduler.kv_holding_waiting.remove_request(request)
        scheduler.deferred_waiting.discard(request)
        scheduler.finished_recving_kv_req_ids.discard(request.request_id)
        scheduler._inflight_prefills.discard(request)
        scheduler._set_kv_fetch_stage(request, None)
        scheduler.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        request.status = (
            RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        )
        scheduler.waiting.prepend_request(request)


@contextmanager
def quiet_pool_resets() -> Iterator[None]:
    """Inside, have block pools not log that they are reset.

    Without it: each switch writes a line for each replica that is left, which looks like a reset
    that a user asked for. Missing seam: a reset without a log line.
    """
    logger = logging.getLogger("vllm.v1.core.block_pool")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def quiet_connectors() -> None:
    """Have vLLM not log each KV connector that it makes.

    Without it: each switch writes two lines for each replica, one of them a warning that vLLM's
    interface for connectors may change. PAT checks vLLM's version instead. Missing seam: none is
    meant, for other engines make one connector.
    """
    for name in ("v1.base", "factory"):
        full_name = f"vllm.distributed.kv_transfer.kv_connector.{name}"
        logging.getLogger(full_name).setLevel(logging.ERROR)


# -------------------------------------------------------------------- workers


def install_tp_group(group: GroupCoordinator) -> None:
    """Make `group` vLLM's tensor-parallel group, as which layers look it up at each call.

    Without it: there is one layout only. vLLM assigns the group once, at start. Missing seam:
    model runners that are given their group.
    """
    import vllm.distributed.parallel_state as parallel_state

    _change_workspaces(parallel_state._TP, group)
    parallel_state._TP = group
    # vLLM lets the engram TP group be the TP group unless a config sets it apart.
    parallel_state._ETP = group


_FLASHINFER = "vllm.distributed.device_communicators.flashinfer_all_reduce"
_WORKSPACES = {
    "_fi_ar_workspace": None,
    "_fi_ar_quant_workspace": None,
    "_fi_ar_workspace_failed": False,
    "_fi_ar_quant_workspace_failed": False,
}
"""Of `_FLASHINFER`: made for one group, by the first that asks, and looked up at each call."""
_workspaces_of: dict[int, dict[str, Any]] = {}


def _change_workspaces(previous: GroupCoordinator | None, group: GroupCoordinator) -> None:
    """Have FlashInfer's all-reduce find the workspaces of `group`, or none yet.

    Without it: the all-reduce of one layout uses the workspace that was made for the ranks of
    another. Missing seam: workspaces by group.
    """
    module = sys.modules.get(_FLASHINFER)
    if module is None or previous is None or group is previous:
        return
    _workspaces_of[id(previous)] = {name: getattr(module, name) for name in _WORKSPACES}
    vars(module).update(_workspaces_of.get(id(group), _WORKSPACES))


@contextmanager
def probe_p2p_between(devices_of: Callable[[int], Sequence[int]]) -> Iterator[None]:
    """Inside, have new groups look for peer access between the devices of their ranks.

    Without it: vLLM takes a rank's place in its group for the index of its device. A layout's group
    would use its custom all-reduce, or not, by what other devices can do. Missing seam: groups
    that are told the devices of their ranks.

    Args:
        devices_of: index of the device of each rank in this rank's group of a given size.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        yield
        return
    import torch
    import vllm.envs as envs
    from vllm.distributed.device_communicators import custom_all_reduce

    stock = custom_all_reduce._can_p2p
    visible = current_platform.logical_device_id_to_visible_device_id

    def can_p2p(rank: int, world_size: int) -> bool:
        others = list(devices_of(world_size))
        own = others.pop(rank)
        if envs.VLLM_SKIP_P2P_CHECK:
            can = torch.cuda.can_device_access_peer
            return all(can(visible(own), visible(other)) for other in others)
        return all(custom_all_reduce.gpu_p2p_access_check(own, other) for other in others)

    custom_all_reduce._can_p2p = can_p2p
    try:
        yield
    finally:
        custom_all_reduce._can_p2p = stock


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


@contextmanager
def one_graph_pool(pool: Any) -> Iterator[None]:
    """Inside, have whoever asks for a new pool of CUDA graphs get this one.

    Without it: see `graphs_measured_apart`. Missing seam: vLLM's measurement of graphs chooses the
    pool itself.

    Args:
        pool: what `torch.cuda.graph_pool_handle` returned. Some graph must live in it for longer.
    """
    import torch

    original = torch.cuda.graph_pool_handle
    torch.cuda.graph_pool_handle = lambda: pool
    try:
        yield
    finally:
        torch.cuda.graph_pool_handle = original


@contextmanager
def use_attention_workspace(workspace: torch.Tensor | None) -> Iterator[None]:
    """Inside, have new attention metadata builders use this workspace, if there is one.

    Without it: each layout's FlashInfer has a workspace of its own, of 394 MiB or more. vLLM shares
    one among the groups of a runner, whose attention writes to it in turn, as layouts do. Missing
    seam: a runner that is given a workspace.

    Args:
        workspace: of a layout with at least as many heads on a rank (`attention_workspace`).
    """
    from vllm.v1.worker.utils import AttentionGroup

    original = AttentionGroup.create_metadata_builders

    def create(group: Any, *args: Any, **options: Any) -> None:
        original(group, *args, **options)
        for builder in group.metadata_builders:
            if workspace is not None and hasattr(builder, "set_workspace_buffer"):
                builder.set_workspace_buffer(workspace)

    AttentionGroup.create_metadata_builders = create  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        AttentionGroup.create_metadata_builders = original  # type: ignore[method-assign]


def attention_workspace(runner: RunnerV1 | RunnerV2) -> torch.Tensor | None:
    """The workspace of a runner's attention backend, if it has one. It comes with the KV cache."""
    for groups in getattr(runner, "attn_groups", ()):
        for group in groups:
            for builder in group.metadata_builders:
                # Of vLLM's own protocol between builders, which few backends take part in.
                get = getattr(builder, "_get_workspace_buffer", None)
                if get is not None:
                    return get()  # type: ignore[no-any-return]
    return None


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


def skip_empty_drafts(runner: RunnerV1 | RunnerV2) -> None:
    """Have a runner with an n-gram drafter make a step of draft length 0 as without a drafter.

    Without it: Model Runner V1 looks for n-grams and samples through the rejection sampler in such
    a step, too; V2 looks for as many drafts as in any other step and masks them. Missing seam:
    vLLM tells the drafter the length, not the runner whether to draft.
    """
    config = runner.speculative_config
    if config is None:
        return
    if hasattr(runner, "req_states"):
        _replace(runner.speculator, "propose", functools.partial(_propose, runner.speculator))
    elif config.method == "ngram":  # "ngram_gpu" keeps tokens of its own, which it has to update

        def execute(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(step: SchedulerOutput, *args: Any, **options: Any) -> Any:
                drafts = step.scheduled_spec_decode_tokens or step.num_spec_tokens_to_schedule
                samples = step.total_num_scheduled_tokens > 0
                runner.speculative_config = config if drafts or not samples else None
                return original(step, *args, **options)

            return call

        def sample(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                try:
                    return original(*args, **options)
                finally:
                    runner.speculative_config = config

            return call

        _replace(runner, "execute_model", execute)
        _replace(runner, "sample_tokens", sample)


def take_every_draft_length(runner: RunnerV1 | RunnerV2) -> None:
    """Have a runner with an n-gram drafter serve every draft length that its config names.

    Without it: the drafter "ngram_gpu" of Model Runner V1 fails in a step of another draft length
    than the longest. V2 captures no graphs for the longest ones where a layout runs fewer requests
    at once than there are draft lengths, and looks among the graphs of one size only, which need
    not have the step's draft length. Missing seam: vLLM takes the lengths from a schedule by number
    of requests.
    """
    config = runner.speculative_config
    if config is None:
        return
    if hasattr(runner, "req_states"):
        import vllm.v1.worker.gpu.cudagraph_utils as cudagraph_utils

        _replace(cudagraph_utils, "build_dynamic_sd_schedule_lookup", _look_up_all)
        _replace(cudagraph_utils.CudaGraphManager, "_init_candidates", _find_all)
    elif config.method == "ngram_gpu":
        _replace(runner.drafter, "propose", functools.partial(_propose_some, runner.drafter))


def _look_up_all(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def call(schedule: Sequence[Any], vllm_max_batch_size: int, **options: Any) -> list[int]:
        return original(schedule, max(vllm_max_batch_size, len(schedule)), **options)

    return call


def _find_all(original: Callable[..., None]) -> Callable[..., None]:
    def call(manager: CudaGraphManager) -> None:
        original(manager)
        for graphs in manager._capture_descs.values():
            graphs[:] = _worth_capturing(graphs, manager.decode_query_len)
        for key in manager._candidates:
            manager._candidates[key] = _smallest_graphs(manager, *key)

    return call


def _worth_capturing(
    graphs: Sequence[BatchExecutionDescriptor], longest: int
) -> list[BatchExecutionDescriptor]:
    """Of graphs for some drafts, but not the most, those for batches that have one for none.

    And the largest of each length. There is a size for nearly each batch otherwise, and so a graph
    of each length: eight times as many as without speculation.
    """
    batches = {graph.num_reqs for graph in graphs if graph.uniform_token_count == 1}
    kept: list[BatchExecutionDescriptor] = []
    seen: set[int | None] = {None, 1, longest}
    for graph in graphs:  # the largest comes first
        length = graph.uniform_token_count
        if length not in seen or length in (None, 1, longest) or graph.num_reqs in batches:
            kept.append(graph)
        seen.add(length)
    return kept


def _smallest_graphs(
    manager: CudaGraphManager, num_tokens: int, num_active_loras: int
) -> list[BatchExecutionDescriptor]:
    """Of each kind, the smallest graph for so many tokens; kinds for fewer steps come first."""
    kinds: dict[Any, BatchExecutionDescriptor] = {}
    for graphs in manager._capture_descs.values():
        for graph in graphs:  # the largest comes first
            if graph.num_tokens >= num_tokens and graph.num_active_loras == num_active_loras:
                length = graph.uniform_token_count or math.inf
                kinds[-graph.cg_mode.value, length, graph.num_ubatches] = graph
    return [kinds[kind] for kind in sorted(kinds)]


def _propose_some(drafter: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(num_speculative_tokens: int, *args: Any, **options: Any) -> Any:
        drafts, num_valid = original(drafter.k, *args, **options)
        return drafts[:, :num_speculative_tokens], num_valid.clamp(max=num_speculative_tokens)

    return call


def draft_near_the_longest_context(runner: RunnerV1 | RunnerV2) -> None:
    """Have Model Runner V1's n-gram drafter go on where a request comes near `max_model_len`.

    Without it: as soon as one request of a step does, V1 gives zeros for drafts to all of them, on
    CPU by a CUDA stream, which ends the engine. That protects a drafter's KV cache; the n-gram
    drafter has none, and proposes nothing beyond `max_model_len` itself. Missing seam: vLLM does
    not ask the drafter.
    """
    if hasattr(runner, "req_states") or runner.speculative_config is None:
        return
    if runner.speculative_config.method == "ngram":
        _replace(runner, "_input_fits_in_drafter", lambda original: _is_attended)


def _is_attended(common_attn_metadata: Any) -> bool:
    return common_attn_metadata is not None


def _propose(speculator: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(input_batch: Any, *args: Any, **options: Any) -> Any:
        if _asks_for_none(options):
            return speculator.drafts[: input_batch.num_reqs]  # which the runner masks
        return original(input_batch, *args, **options)

    return call


def _asks_for_none(options: Mapping[str, Any]) -> bool:
    return options.get("num_speculative_tokens") == 0 and not options.get("dummy_run")


def verify_sampled_drafts() -> None:
    """Have Model Runner V1 verify drafts on CPU by their requests' temperature, top-k and top-p.

    Without it: vLLM's C++ writes these parameters of each draft token into a copy that nobody reads
    (vLLM issue 55005), so that drafts are verified by whatever lies in the memory, also those of
    greedy requests beside sampled ones. And where no request of a step has a draft, as in a
    prefill, top-k fails. Missing seam: vLLM's registry of kernels would do for the first, but
    complains in each worker of a kernel that is registered again.
    """
    import vllm.v1.sample.rejection_sampler as rejection_sampler

    def constraining(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def apply(logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            return original(logits, *args, **options) if len(logits) else logits

        return apply

    _replace(rejection_sampler, "expand_batch_to_tokens", lambda original: _of_each_token)
    _replace(rejection_sampler, "apply_sampling_constraints", constraining)


def _of_each_token(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """A value [requests] for each token [tokens]; `cu_num_tokens` [requests] counts up to them."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    of_tokens = x.repeat_interleave(counts, output_size=num_tokens)
    return of_tokens.masked_fill(of_tokens == replace_from, replace_to)


@contextmanager
def token_ids_of(host: RunnerV1 | RunnerV2 | None) -> Iterator[None]:
    """Inside, have a new Model Runner V2 keep token ids where `host` does, if that is one, too.

    Without it: each layout pins `max_num_seqs * max_model_len * 4` bytes of host memory, which are
    gigabytes for long contexts, and torch keeps pinned memory that is freed. Only one layout has
    requests at any time, and a request begins by writing its tokens. Missing seam: a runner that
    takes given request states.

    Args:
        host: of the runners the one with the most requests.
    """
    if host is None or not hasattr(host, "req_states"):
        yield
        return
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

    states.StagedWriteTensor = take  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        states.StagedWriteTensor = make  # type: ignore[misc]


@contextmanager
def input_embeddings_of(host: RunnerV1 | RunnerV2 | None) -> Iterator[None]:
    """Inside, have a new Model Runner V1 keep input embeddings where `host` does, if that is one.

    Without it: each layout takes `max_num_batched_tokens * hidden_size` elements of device memory
    and pins as much host memory, for embeddings that a step writes before it reads them. Missing
    seam: a runner that takes given buffers.

    Args:
        host: of the runners the one with the most tokens in a step.
    """
    if host is None or not hasattr(host, "inputs_embeds") or hasattr(host, "req_states"):
        yield
        return
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

    GPUModelRunner._make_buffer = make  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        GPUModelRunner._make_buffer = original  # type: ignore[method-assign]


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


# -------------------------------------------------------------------- weights


def keep_plain_weights(model: nn.Module) -> None:
    """Have vLLM not pack the weights of a model for its CPU kernels. Does nothing elsewhere.

    Without it: vLLM frees the plain weights on CPU, of which the layouts' weights are views.
    Missing seam: an option of the CPU platform.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, LinearBase):
            module._cpu_skip_gemm_dispatch = True  # type: ignore[attr-defined]  # vLLM's own name
        elif isinstance(module, VocabParallelEmbedding):
            module.quant_method = _plain_embedding()()


@functools.cache
def _plain_embedding() -> type:
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class PlainEmbedding(UnquantizedEmbeddingMethod):
        """vLLM's method for embeddings, without the packing."""

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.cpu_linear = torch.nn.functional.linear  # type: ignore[attr-defined]

    return PlainEmbedding


def tie_word_embeddings(model: nn.Module, model_config: ModelConfig) -> None:
    """Have vLLM tie a loaded model's head to its embeddings, if that is due, and not ask again.

    Without it: vLLM compares the two after each layout's weights are loaded. That is too late for
    a strategy that has taken them for two weights by then. And a layout with smaller shards may
    have equal ones by chance; what the base layout says holds for all. Missing seam: the
    comparison is no part of a loader's `load_weights`.
    """
    from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings

    before = len(list(model.parameters()))
    maybe_retie_word_embeddings(model, model_config)
    if len(list(model.parameters())) == before:
        model_config.word_embeddings_untied_by_checkpoint = False


def refuse_load_weights(model: nn.Module, refuse: Callable[..., Any]) -> None:
    """Have `model.load_weights` call `refuse`, which raises.

    Without it: a trainer's call loads new weights into the base layout's model only, although the
    other layouts cannot be given them. Trainers call the model's method themselves. Missing seam:
    a worker is not asked before that.
    """
    _replace(model, "load_weights", lambda original: refuse)

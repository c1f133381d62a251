"""What PAT does to vLLM's schedulers and their block pools, in the engine core."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from pat_vllm.patches.compat import forget_kv_fetch
from pat_vllm.patches.replacing import replaced

if TYPE_CHECKING:
    from vllm.multimodal.encoder_budget import MultiModalBudget
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager


def block_pools_from(take: Callable[..., BlockPool]) -> AbstractContextManager[None]:
    """Inside, have new schedulers call `take` where they make a `BlockPool`.

    Without it: a switch makes an object for each KV block, which on eight large GPUs takes longer
    than all the rest of the switch. Missing seam: a scheduler that takes a given pool.
    """
    from vllm.v1.core import kv_cache_coordinator

    return replaced(kv_cache_coordinator, "BlockPool", take)


def multimodal_budgets_from(take: Callable[..., MultiModalBudget]) -> AbstractContextManager[None]:
    """Inside, have new schedulers call `take` where they make a `MultiModalBudget`.

    Without it: a switch makes the image processor of each replica, milliseconds each. Missing seam:
    a scheduler that takes a given budget.
    """
    from vllm.v1.core.sched import scheduler

    return replaced(scheduler, "MultiModalBudget", take)


@contextmanager
def linear_time_admission(scheduler: Scheduler) -> Iterator[None]:
    """Inside, the first `schedule()` of a new scheduler admits loads in linear time.

    Without it: a switch that carries many requests takes time that is quadratic in their number.
    A load is a request whose KV a connector brings. For each one that vLLM admits, it sums the
    blocks that all of them still need. Here each is counted once, since no step runs inside, and is
    kept out of vLLM's set until the end. Missing seam: admission of a batch of loads.
    """
    # Already inside.
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
    # vLLM would look at each block that it takes for a prefix to evict; a new pool has none.
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
    """Have vLLM's manager of grammars prepare for so many requests in a step, before its first.

    Without it: it has bitmasks for the engine's `max_num_seqs`. A step of a layout that runs more
    requests with structured output fails. Missing seam: a manager that is told the number.
    """
    config = manager.vllm_config
    if max_num_seqs <= config.scheduler_config.max_num_seqs:
        return
    config = copy.copy(config)  # the engine's own limit stays
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_seqs = max_num_seqs
    # Others hold this object already, so a new one would not do.
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
        forget_kv_fetch(scheduler, request)
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

    # A level would do, but each change of one makes all loggers forget what they let through.
    def matters(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    logger.addFilter(matters)
    try:
        yield
    finally:
        logger.removeFilter(matters)


def quiet_connectors() -> None:
    """Have vLLM not log each KV connector that it makes. An engine's config forgets it again.

    Without it: each switch writes two lines for each replica, one of them a warning that vLLM's
    interface for connectors may change. PAT checks vLLM's version instead. Missing seam: none is
    meant, for other engines make one connector.
    """
    for name in ("v1.base", "factory"):
        full_name = f"vllm.distributed.kv_transfer.kv_connector.{name}"
        logging.getLogger(full_name).setLevel(logging.ERROR)

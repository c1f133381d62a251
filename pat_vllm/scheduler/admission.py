"""Many loads admitted at once, as at a switch, in time that grows with their blocks only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


@contextmanager
def linear_time_admission(scheduler: Scheduler) -> Iterator[None]:
    """Inside, the first `schedule()` of a new scheduler saves work that finds nothing.

    For each load that vLLM admits, it counts what all loads in flight will still need. Here nothing
    but admissions happens in between, so each is counted once: until the end it is taken out of
    vLLM's set. And vLLM looks at each block for prefixes that are cached in it, of which an empty
    pool has none.
    """
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

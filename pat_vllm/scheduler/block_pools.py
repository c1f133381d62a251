"""Block pools that outlive the schedulers they belong to."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

from vllm.v1.core.block_pool import BlockPool

from pat_vllm.patches.schedulers import quiet_pool_resets

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

_Kind: TypeAlias = frozenset[tuple[str, Any]]
"""With which options vLLM makes a pool."""

_SORTED_BLOCKS = 16_384
"""Free blocks of a pool up to this size are put in order: consecutive ones are copied faster."""


class BlockPools:
    """Keeps the pools of discarded schedulers for the next ones.

    vLLM makes an object for each block. For the blocks of eight large GPUs that takes longer than
    all else that a switch does.
    """

    def __init__(self) -> None:
        self._kept: dict[_Kind, list[BlockPool]] = defaultdict(list)
        self._kind_of: WeakKeyDictionary[BlockPool, _Kind] = WeakKeyDictionary()

    def take(self, metrics_collector: Any = None, **options: Any) -> BlockPool:
        """What vLLM makes with these arguments: a kept pool where there is one of the kind."""
        kind = frozenset(options.items())  # whatever a version of vLLM tells a pool
        if kept := self._kept[kind]:
            pool = kept.pop()
            pool.metrics_collector = metrics_collector
        else:
            pool = BlockPool(metrics_collector=metrics_collector, **options)
            self._kind_of[pool] = kind
        return pool

    def keep(self, scheduler: Scheduler) -> None:
        """Empty the pool of a scheduler that will not run again, and keep it."""
        manager = scheduler.kv_cache_manager
        for request in list(scheduler.requests.values()):
            manager.free(request)
        pool = manager.block_pool
        with quiet_pool_resets():
            if not pool.reset_prefix_cache():
                return  # somebody else holds blocks of it
        free = pool.free_block_queue
        if pool.num_gpu_blocks <= _SORTED_BLOCKS:
            blocks = free.popleft_n(free.num_free_blocks)
            free.append_n(sorted(blocks, key=lambda block: block.block_id))
        self._kept[self._kind_of[pool]].append(pool)

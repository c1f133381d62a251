"""A switch between two layouts of one tp: schedulers, blocks and KV stay as they are.

The layouts differ in how experts lie, not in who has which request's KV. All that changes is who
computes: what runs is queued again with its blocks (`queue_with_blocks`), and vLLM's schedulers
tell the other layout's workers of it with its next step, as of a request whose KV has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from pat_vllm.layout import Layout
    from pat_vllm.scheduler.replica import Replica


def keeps_places(source: Layout, target: Layout, replicas: Sequence[Replica]) -> bool:
    """Whether the requests of `source` may stay where they are.

    A scheduler preempts what runs for lack of blocks, but not what waits with blocks of its own. So
    there have to be blocks for the next step of everything.
    """
    return source.shares_kv(target) and all(
        len(replica.kinds) * sum(_blocks_of_a_step(replica.scheduler))
        <= replica.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        for replica in replicas
    )


def _blocks_of_a_step(scheduler: Scheduler) -> list[int]:
    """What each request that runs may need at most in each group; of a prompt, all that is left."""
    lookahead = scheduler.num_lookahead_tokens + scheduler.num_spec_tokens + 1
    return [
        2 + (request.num_tokens - request.num_computed_tokens + lookahead) // scheduler.block_size
        for request in scheduler.running
    ]

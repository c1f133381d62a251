"""Whether a switch between two layouts of one tp may leave requests, blocks and KV in place.

Such layouts differ only in how experts lie on a replica's ranks, so no KV moves. But each worker
goes on with the other layout's model runner, which has to be told of the requests. So `StayInPlace`
queues those that run again, with their blocks (`queue_with_blocks`). vLLM's scheduler then sends
tokens and blocks with the next step, as for a request that it resumes.
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

    After the switch all of them wait and hold blocks. vLLM preempts only running requests to free
    blocks. So the free ones must be enough for the next step of every request, in every KV cache
    group (`Replica.kinds` has one kind for each).
    """
    return source.shares_kv(target) and all(
        len(replica.kinds) * sum(_blocks_of_a_step(replica.scheduler))
        <= replica.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        for replica in replicas
    )


def _blocks_of_a_step(scheduler: Scheduler) -> list[int]:
    """For each running request, the most blocks of one group that its next step may need.

    All that is left of a prompt counts. n tokens lie in at most 2 + n // block_size blocks.
    """
    lookahead = scheduler.num_lookahead_tokens + scheduler.num_spec_tokens + 1
    return [
        2 + (request.num_tokens - request.num_computed_tokens + lookahead) // scheduler.block_size
        for request in scheduler.running
    ]

"""Block pools go from discarded schedulers to new ones, as empty as new ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.v1.core.block_pool import BlockPool

from pat_vllm.scheduler import block_pools
from pat_vllm.scheduler.block_pools import BlockPools

KIND = dict(num_gpu_blocks=64, enable_caching=True, hash_block_size=16)


def scheduler_with(pool: BlockPool, requests: dict[str, list[Any]]) -> Any:
    """As much of a scheduler as is asked for: its requests hold blocks of the pool."""
    manager = SimpleNamespace(
        block_pool=pool, free=lambda request: pool.free_blocks(requests[request])
    )
    return SimpleNamespace(kv_cache_manager=manager, requests={name: name for name in requests})


def make(kept: BlockPools, **kind: Any) -> BlockPool:
    return kept.take(**{**KIND, "metrics_collector": None, **kind})


@pytest.mark.parametrize("most_sorted", [64, 63])
def test_a_pool_comes_back_empty(monkeypatch: pytest.MonkeyPatch, most_sorted: int) -> None:
    """Its blocks are in order, unless they are too many to be sorted."""
    monkeypatch.setattr(block_pools, "_SORTED_BLOCKS", most_sorted)
    kept = BlockPools()
    pool = make(kept)
    held = {name: pool.get_new_blocks(n) for name, n in (("a", 5), ("b", 9))}
    pool.free_blocks(pool.get_new_blocks(7))
    kept.keep(scheduler_with(pool, held))

    collector = Mock()
    again = make(kept, metrics_collector=collector)
    assert again is pool and again.metrics_collector is collector
    assert again.get_num_free_blocks() == 63 == make(kept).get_num_free_blocks()
    ids = [block.block_id for block in again.get_new_blocks(63)]
    assert sorted(ids) == [*range(1, 64)]
    assert (ids == sorted(ids)) == (most_sorted == 64)


def test_only_a_free_pool_of_the_kind_is_taken() -> None:
    kept = BlockPools()
    pool = make(kept)
    kept.keep(scheduler_with(pool, {}))
    assert make(kept, num_gpu_blocks=65) is not pool
    assert make(kept, enable_caching=False) is not pool
    assert make(kept) is pool
    assert make(kept) is not pool, "somebody has it"
    pool.get_new_blocks(1)  # which nobody gives back
    kept.keep(scheduler_with(pool, {}))
    assert make(kept) is not pool

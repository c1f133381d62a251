"""Block pools go from discarded schedulers to new ones, as empty as new ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool

from pat_vllm.scheduler import block_pools as pools
from pat_vllm.scheduler.block_pools import BlockPools

KIND = dict(num_gpu_blocks=64, enable_caching=True, hash_block_size=16)


def scheduler_with(pool: BlockPool, requests: dict[str, list[Any]]) -> Any:
    """As much of a scheduler as is asked for: its requests hold blocks of the pool."""
    manager = SimpleNamespace(
        block_pool=pool, free=lambda request: pool.free_blocks(requests[request])
    )
    return SimpleNamespace(kv_cache_manager=manager, requests={name: name for name in requests})


def make(kept: BlockPools, **kind: Any) -> BlockPool:
    with kept.reused():
        return kv_cache_coordinator.BlockPool(**{**KIND, "metrics_collector": None, **kind})


def test_a_pool_comes_back_empty_and_in_order() -> None:
    kept = BlockPools()
    pool = make(kept)
    held = {name: pool.get_new_blocks(n) for name, n in (("a", 5), ("b", 9))}
    pool.free_blocks(pool.get_new_blocks(7))
    kept.keep(scheduler_with(pool, held))

    collector = Mock()
    again = make(kept, metrics_collector=collector)
    assert again is pool and again.metrics_collector is collector
    assert again.get_num_free_blocks() == 63 == make(kept).get_num_free_blocks()
    assert [block.block_id for block in again.get_new_blocks(63)] == list(range(1, 64))


def test_other_kinds_and_second_pools_are_new() -> None:
    kept = BlockPools()
    pool = make(kept)
    kept.keep(scheduler_with(pool, {}))
    assert make(kept, num_gpu_blocks=65) is not pool
    assert make(kept, enable_caching=False) is not pool
    assert make(kept) is pool
    assert make(kept) is not pool, "somebody has it"


def test_a_pool_with_blocks_that_somebody_holds_is_not_kept() -> None:
    kept = BlockPools()
    pool = make(kept)
    pool.get_new_blocks(1)
    kept.keep(scheduler_with(pool, {}))
    assert make(kept) is not pool


def test_large_pools_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_SORTED_BLOCKS", 32)
    kept = BlockPools()
    pool = make(kept)
    kept.keep(scheduler_with(pool, {"a": pool.get_new_blocks(3)}))
    assert sorted(block.block_id for block in make(kept).get_new_blocks(63)) == [*range(1, 64)]


def test_vllm_makes_its_own_outside() -> None:
    kept = BlockPools()
    with pytest.raises(KeyError), kept.reused():
        raise KeyError
    assert kv_cache_coordinator.BlockPool is BlockPool

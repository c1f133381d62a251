"""The prefix cache of a replica: what it holds, and what a switch puts into it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from pat_vllm.kv_transfer.placement import RequestPlacement, place_requests
from pat_vllm.kv_transfer.plan import RequestBlocks
from pat_vllm.models.kinds import longest_hit
from pat_vllm.scheduler.switching.chains import Chain, PlacedChain, Run, fill

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from pat_vllm.layout import Layout
    from pat_vllm.scheduler.replica import Replica


@cache
def _suffix(group: int) -> bytes:
    """The bytes that vLLM appends to the hashes of a KV cache group's blocks."""
    return make_block_hash_with_group_id(BlockHash(b""), group)


def find(replica: Replica, hashes: Chain, group: int = 0) -> list[KVCacheBlock | None]:
    """The cached blocks of a group with these hashes, as vLLM would find them."""
    get, suffix = _get(replica), _suffix(group)
    return [get(block_hash + suffix) for block_hash in hashes]


def _get(replica: Replica) -> Any:
    """vLLM's look-up of a cached block, or None, by a hash with its group's suffix."""
    return replica.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block.get_one_block


def num_cached(replica: Replica, chain: Chain) -> int:
    """Number of blocks of a chain, from the first on, that a request would find cached."""
    get = _get(replica)
    return longest_hit(
        replica.kinds,
        len(chain),
        lambda group, place: get(chain[place] + _suffix(group)) is not None,
    )


def place_chains(
    chains: Sequence[Chain], replicas: Sequence[Replica], source: Layout, target: Layout
) -> list[PlacedChain]:
    """Find the prefix of each chain that a replica of layout `source` still has, and place it.

    Chains are spread over the replicas of layout `target` like requests with their KV. Later
    requests come to them, since the router looks into the caches. If chains with a common prefix
    go to several replicas, each of these gets the prefix.
    """
    prefixes: list[tuple[Chain, int]] = []
    for chain in chains:
        cached = [num_cached(replica, chain) for replica in replicas]
        if longest := max(cached):
            prefixes.append((chain[:longest], cached.index(longest)))
    names = [f"{i:09}" for i in range(len(prefixes))]  # of equally long ones, the first one first
    placement = place_requests(
        [
            RequestPlacement(name, at, len(chain))
            for name, (chain, at) in zip(names, prefixes, strict=True)
        ],
        source,
        target,
    )
    return [
        PlacedChain(chain, at, placement[name])
        for name, (chain, at) in zip(names, prefixes, strict=True)
    ]


def carry_cached(
    wanted: Iterable[PlacedChain],
    held: Sequence[Sequence[set[bytes]]],
    replicas: Sequence[Replica],
    new_replicas: Sequence[Replica],
) -> list[RequestBlocks]:
    """Fill blocks of new replicas that no request uses with what other replicas have cached.

    Args:
        wanted: chains, the most wanted one first.
        held: hashes of the blocks that come to each new replica with its requests, by group.
        replicas: those of the layout that the switch leaves.
        new_replicas: those of the layout that it enters.

    Returns:
        Where the KV of these blocks lies, and where it goes.
    """
    room = [
        replica.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        for replica in new_replicas
    ]
    filled = fill(
        wanted,
        lambda index, hashes, group: find(replicas[index], hashes, group),
        new_replicas[0].kinds,
        held,
        room,
    )
    return [
        RequestBlocks(
            "cached",  # in place of a request id, for errors
            run.source_replica,
            tuple(block.block_id for block in run.blocks),
            replica.index,
            tuple(ids),
            run.group,
        )
        for replica, runs in zip(new_replicas, filled, strict=True)
        for run, ids in zip(runs, _take_up(replica, runs), strict=True)
    ]


def _take_up(replica: Replica, runs: Sequence[Run[KVCacheBlock]]) -> list[list[int]]:
    """Put blocks of other replicas into the cache of a new one, as blocks that no request uses.

    They stay free: requests get the other free blocks first, then the least wanted of these.

    Args:
        runs: the most wanted one first.

    Returns:
        For each run the ids of the blocks that its KV has to come to.
    """
    pool = replica.scheduler.kv_cache_manager.block_pool
    ids = []
    taken: list[KVCacheBlock] = []
    for run in runs:
        blocks = pool.free_block_queue.popleft_n(len(run.blocks))
        for block, cached in zip(blocks, run.blocks, strict=True):
            assert cached.block_hash is not None
            block.set_block_hash(cached.block_hash, cached.block_hash_num_tokens)
            pool.cached_block_hash_to_block.insert(cached.block_hash, block)
        if pool.metrics_collector is not None:
            for block in blocks:
                pool.metrics_collector.on_block_allocated(block)
        ids.append([block.block_id for block in blocks])
        taken += blocks
    pool.free_block_queue.append_n(taken[::-1])
    return ids

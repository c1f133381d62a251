"""The prefix cache of a replica: what it holds, and what a switch puts into it.

PAT's engines have one group of KV caches: a block is found by its hash alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from pat_vllm.chains import Chain, PlacedChain, fill
from pat_vllm.kv_transfer.plan import RequestBlocks
from pat_vllm.routing import Placed, spread

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from pat_vllm.layout import Layout
    from pat_vllm.scheduler.replica import Replica


def find(replica: Replica, block_hash: Hashable) -> KVCacheBlock | None:
    """The block with this hash, as vLLM would find it, or None."""
    found = replica.scheduler.kv_cache_manager.block_pool.get_cached_block(block_hash, [0])
    return None if found is None else found[0]


def num_cached(replica: Replica, chain: Chain) -> int:
    """Number of blocks of a chain, from the first on, that the cache has.

    vLLM drops the last blocks of a chain first, so that it has all before one that it has.
    """
    if not chain or find(replica, chain[0]) is None:
        return 0
    return bisect_left(chain, True, key=lambda one: find(replica, one) is None)


def num_unused(replica: Replica, chain: Chain) -> int:
    """How many of these no request uses. Who uses a block uses all before it."""
    cached = chain[: num_cached(replica, chain)]

    def is_free(block_hash: Hashable) -> bool:
        block = find(replica, block_hash)
        return block is not None and block.ref_cnt == 0

    return len(cached) - bisect_left(cached, True, key=is_free)


def place_chains(
    chains: Sequence[Chain], replicas: Sequence[Replica], source: Layout, target: Layout
) -> list[PlacedChain]:
    """Of each chain what a replica of layout `source` still has, and where it goes in `target`.

    Chains are spread like requests that have their KV. Later requests come to them, for the router
    looks into the caches. What chains of several replicas have in common is in each of these.
    """
    found: list[tuple[Chain, int]] = []
    for chain in chains:
        cached = [num_cached(replica, chain) for replica in replicas]
        if longest := max(cached):
            found.append((chain[:longest], cached.index(longest)))
    names = [f"{i:09}" for i in range(len(found))]  # of equally long ones, the first one first
    placement = spread(
        [Placed(name, at, len(chain)) for name, (chain, at) in zip(names, found, strict=True)],
        source,
        target,
    )
    return [
        PlacedChain(chain, at, placement[name])
        for name, (chain, at) in zip(names, found, strict=True)
    ]


def carry_cached(
    wanted: Iterable[PlacedChain],
    held: Sequence[set[Hashable]],
    replicas: Sequence[Replica],
    fresh: Sequence[Replica],
) -> list[RequestBlocks]:
    """Fill blocks of new replicas that no request uses with what other replicas have cached.

    Args:
        wanted: chains, the most wanted one first.
        held: hashes of the blocks that come to each new replica with its requests.
        replicas: those that are left.
        fresh: the new ones.

    Returns:
        Where the KV of these blocks lies, and where it goes.
    """
    room = [one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() for one in fresh]
    filled = fill(wanted, lambda index, one: find(replicas[index], one), held, room)
    blocks = []
    for replica, cached in zip(fresh, filled, strict=True):
        ids = _take_up(replica, [one.block for one in cached])
        pairs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for one, block_id in zip(cached, ids, strict=True):
            pairs[one.source_replica].append((one.block.block_id, block_id))
        for source, ends in pairs.items():
            source_blocks, target_blocks = zip(*ends, strict=True)
            blocks.append(
                RequestBlocks("cached", source, source_blocks, replica.index, target_blocks)
            )
    return blocks


def _take_up(replica: Replica, cached: Sequence[KVCacheBlock]) -> list[int]:
    """Put blocks of other replicas into the cache of a new one, as blocks that no request uses.

    They stay free: requests get the other free blocks first, then the least wanted of these.

    Args:
        cached: the most wanted one first.

    Returns:
        The ids of the blocks that their KV has to come to, in the same order.
    """
    pool = replica.scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(len(cached))
    for block, one in zip(blocks, cached, strict=True):
        assert one.block_hash is not None
        block.set_block_hash(one.block_hash, one.block_hash_num_tokens)
        pool.cached_block_hash_to_block.insert(one.block_hash, block)
    pool.free_blocks(reversed(blocks))
    return [block.block_id for block in blocks]

"""What prefix caches hold, block by block, held against the same KV computed again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_group_id

import pat_vllm
from pat_vllm.layout import Layout
from tests.support.engines import Job, run, scheduler_of


def cached_blocks(llm: Any) -> dict[int, dict[bytes, int]]:
    """Of each replica the hashes in its prefix cache, each with the id of a block."""
    blocks: dict[int, dict[bytes, int]] = {}
    for replica in scheduler_of(llm).replica_set.replicas:
        cache = replica.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block
        blocks[replica.index] = {
            name: cache.get_one_block(name).block_id for name in list(cache._cache)
        }
    return blocks


def _read(
    worker: Any, layout: Layout, ids: Mapping[int, Sequence[tuple[int, int]]]
) -> torch.Tensor:
    """KV of blocks, by group and id, of this rank's replica: [blocks, layers, heads, tokens,
    content]; zeros in layers of other groups."""
    connector = worker._active.connector
    chosen = ids[layout.replica_of(worker.rank)]
    places = [block_id for _, block_id in chosen]
    kv = torch.stack([view[places] for view in connector.kv_caches.values()], dim=1).clone()
    of_layers = torch.tensor([connector._group_of[name] for name in connector.kv_caches])
    of_blocks = torch.tensor([group for group, _ in chosen], dtype=of_layers.dtype)
    kv[of_blocks[:, None] != of_layers] = 0
    return kv


def _kv(llm: Any, blocks: Mapping[int, Mapping[bytes, int]]) -> list[torch.Tensor]:
    """Of each rank, by its number, the KV of its replica's blocks, in the mapping's order."""
    layout = pat_vllm.report(llm).layout
    ids = {
        index: [(get_group_id(name), block_id) for name, block_id in of_hash.items()]  # type: ignore[arg-type]
        for index, of_hash in blocks.items()
    }
    answers: list[torch.Tensor] = llm.collective_rpc(_read, args=(layout, ids))
    assert len(answers) == layout.world_size
    return answers


def assert_caches_hold_their_text(
    llm: Any, texts: Iterable[Sequence[int]], tolerance: float = 1e-4
) -> int:
    """Each cached block of these texts has the KV that the base layout computes for it.

    The engine is idle. Its caches are empty of anything else afterwards.

    Args:
        texts: token ids, together with their prefixes all that is compared.
        tolerance: largest difference of a key's or a value's number.

    Returns:
        Number of (replica, block) pairs that were compared.
    """
    num_kv_heads = llm.model_config.get_total_num_kv_heads()
    layout = pat_vllm.report(llm).layout
    held = cached_blocks(llm)
    by_rank = _kv(llm, held)

    assert pat_vllm.switch(llm, tp=pat_vllm.report(llm).layouts[0].tp)
    assert llm.reset_prefix_cache()
    once: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
    run(llm, {f"again {i}": Job(list(text), once) for i, text in enumerate(texts)})
    base = pat_vllm.report(llm).layout
    again = cached_blocks(llm)
    whole: dict[bytes, torch.Tensor] = {}
    shape = by_rank[0].shape[1:]
    for rank, kv in enumerate(_kv(llm, again)):
        heads = base.kv_heads_of(base.tp_rank_of(rank), num_kv_heads)
        for name, block in zip(again[base.replica_of(rank)], kv, strict=True):
            empty = torch.full((shape[0], num_kv_heads, *shape[2:]), torch.nan)
            whole.setdefault(name, empty)[:, list(heads)] = block

    compared = 0
    for rank, kv in enumerate(by_rank):
        heads = layout.kv_heads_of(layout.tp_rank_of(rank), num_kv_heads)
        replica = layout.replica_of(rank)
        for (name, block_id), block in zip(held[replica].items(), kv, strict=True):
            if name not in whole:
                continue
            worst = (block - whole[name][:, list(heads)]).abs().max().item()
            assert worst <= tolerance, f"block {block_id} of replica {replica}: {worst}"
            compared += rank == layout.leader_of(replica)
    return compared

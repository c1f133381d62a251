"""vLLM's side of `tests.support.kinds.LaterHalf`: a spec and a manager of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import (
    SingleTypeKVCacheManager,
    register_all_kvcache_specs,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

register_all_kvcache_specs(None)  # vLLM registers its own only before the first


class LaterHalfManager(SingleTypeKVCacheManager):
    @classmethod
    def find_longest_cache_hit(  # type: ignore[override]  # vLLM passes all by keyword
        cls,
        *,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: Any,
        **others: Any,
    ) -> Any:
        """The longest prefix whose later half is cached."""
        size = kv_cache_spec.block_size
        for blocks in range(max_length // size, -1, -1):
            first = blocks * size // 2 // size
            hits = [
                block_pool.get_cached_block(block_hashes[i], kv_cache_group_ids)
                for i in range(first, blocks)
            ]
            if all(hits):
                break
        nulls = [block_pool.null_block] * first
        groups = range(len(kv_cache_group_ids))
        return tuple([*nulls, *(hit[i] for hit in hits)] for i in groups), blocks * size

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        return 0

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // 2


@register_kv_cache_spec(manager_class=LaterHalfManager)
@dataclass(frozen=True, kw_only=True)
class LaterHalfSpec(AttentionSpec):
    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        blocks = -(-vllm_config.model_config.max_model_len // self.block_size)
        return blocks * self.page_size_bytes

"""An attention backend for CPU that can be captured: it looks at no value on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl


class Attention(CPUAttentionBackendImpl):
    """Attention over a paged KV cache."""

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        size = kv_cache.shape[2]
        slots = slot_mapping.clamp(min=0)  # padding goes to the null block
        block, token = slots // size, slots % size
        kv_cache[block, :, token] = torch.cat([key, value], dim=-1)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        starts, lengths = attn_metadata.query_start_loc, attn_metadata.seq_lens
        tokens = torch.arange(len(query), dtype=starts.dtype)
        request = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=len(lengths) - 1)
        position = (lengths[request] - (starts[request + 1] - tokens)).clamp(min=0)
        blocks = attn_metadata.block_table[request].long()
        # From [tokens, blocks, heads, tokens of a block, K and V] to [tokens, heads, all, K and V].
        kv = kv_cache[blocks].transpose(1, 2).flatten(2, 3)
        future = torch.arange(kv.shape[2]) > position[:, None]
        # There may be anything, which no kernel reads.
        keys, values = kv.masked_fill(future[:, None, :, None], 0).chunk(2, dim=-1)
        grouped = query.unflatten(1, (self.num_kv_heads, -1))
        scores = torch.einsum("thgc,thnc->thgn", grouped, keys) * self.scale
        scores = scores.masked_fill(future[:, None, None], float("-inf"))
        attended = torch.einsum("thgn,thnc->thgc", scores.softmax(-1), values)
        output.copy_(attended.flatten(1, 2).view_as(output))
        return output


class Metadata(AttentionMetadataBuilder[Any]):
    """What `Attention` reads: vLLM's persistent buffers."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        return SimpleNamespace(
            query_start_loc=common_attn_metadata.query_start_loc,
            seq_lens=common_attn_metadata.seq_lens,
            block_table=common_attn_metadata.block_table_tensor,
        )


class Backend(CPUAttentionBackend):
    """vLLM's for CPU, with these."""

    @staticmethod
    def get_impl_cls() -> Any:
        return Attention

    @staticmethod
    def get_builder_cls() -> Any:
        return Metadata

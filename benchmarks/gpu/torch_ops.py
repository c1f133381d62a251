"""What a decode step has between its matrix products, in plain torch. For CPU, and for checks.

KV cache of a layer: [blocks, KV heads, tokens of a block, 2 (K, V), head_dim].
"""

from __future__ import annotations

import torch
from torch.nn import functional as F


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `x` to `residual` in place, and return that, normed; all are [batch, hidden]."""
    residual += x
    return _rms_norm(residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row, times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate_and_cache(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    rotary: torch.Tensor,
    norms: torch.Tensor | None,
    eps: float,
) -> None:
    """Norm (with `norms`) and rotate q and k of each sequence's last token; put k, v in the cache.

    Args:
        qkv: [batch, (heads + 2 KV heads) * head_dim]; q is written in place.
        tables: block ids, int32 [batch, blocks of a sequence].
        lengths: int32 [batch], the new token included.
        rotary: float32 [positions, head_dim], cosines and then sines.
        norms: [2, head_dim], of q and of k.
    """
    _, kv_heads, tokens, _, head_dim = cache.shape
    every = qkv.view(len(qkv), -1, head_dim)
    q, k, v = every.split([every.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    last = (lengths - 1).long()
    if norms is not None:
        q, k = _rms_norm(q, norms[0], eps), _rms_norm(k, norms[1], eps)
    every[:, : q.shape[1]] = _rotate(q, rotary[last])
    blocks = tables[torch.arange(len(tables), device=tables.device), last // tokens].long()
    cache[blocks, :, last % tokens, 0] = _rotate(k, rotary[last])
    cache[blocks, :, last % tokens, 1] = v


def attention(
    qkv: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Each sequence's last token attends to its tokens: [batch, heads * head_dim]."""
    _, kv_heads, tokens, _, head_dim = cache.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    longest = int(lengths.max())
    blocks = cache[tables[:, : -(-longest // tokens)].long()]
    # [batch, blocks, KV heads, tokens, 2, head_dim] to K and V of [batch, KV heads, all, head_dim].
    k, v = blocks.permute(4, 0, 2, 1, 3, 5).flatten(3, 4).unbind()
    q = qkv.view(len(qkv), -1, 1, head_dim)[:, :heads]
    at = torch.arange(k.shape[2], device=lengths.device)
    mask = (at < lengths[:, None])[:, None, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.reshape(len(qkv), -1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """`x` is [batch, heads, head_dim], `rotary` [batch, head_dim]; halves of a head are paired."""
    cos, sin = rotary[:, None].chunk(2, dim=-1)
    one, other = x.float().chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(x.dtype)

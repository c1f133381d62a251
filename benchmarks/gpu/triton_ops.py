"""The operations of `torch_ops` as Triton kernels, and a plain copy. Import this where Triton is.

Attention splits each sequence's tokens over several programs and combines their results, as the
kernels that vLLM uses do, so that few long sequences fill a GPU too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COPIED = 1024
"""Words of 8 bytes that a program copies."""

_KEYS = 64
"""Tokens that a program of the attention looks at in one go."""

_MOST_SPLITS = 128
_PROGRAMS_PER_PROCESSOR = 4


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy int64 tensors; the number of elements is a multiple of `_COPIED`."""
    _copy[(len(source) // _COPIED,)](source, target, COPIED=_COPIED, num_warps=4)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `torch_ops`."""
    out = torch.empty_like(x)
    hidden = x.shape[1]
    padded = triton.next_power_of_2(hidden)
    _add_rms_norm[(len(x),)](
        x, residual, weight, out, eps, HIDDEN=hidden, PADDED=padded, num_warps=8
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `torch_ops`."""
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), size)
    _silu_mul[(len(out), triton.cdiv(size, 1024))](gate_up, out, SIZE=size, PART=1024)
    return out


def rotate_and_cache(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    rotary: torch.Tensor,
    norms: torch.Tensor | None,
    eps: float,
) -> None:
    """See `torch_ops`."""
    _, kv_heads, tokens, _, head_dim = cache.shape
    every = qkv.shape[1] // head_dim
    _rotate_and_cache[(len(qkv), every)](
        qkv,
        cache,
        tables,
        lengths,
        rotary,
        rotary if norms is None else norms,
        eps,
        tables.stride(0),
        HEADS=every - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        TOKENS=tokens,
        NORMED=norms is not None,
        num_warps=1,
    )


def attention(
    qkv: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """See `torch_ops`."""
    batch = len(qkv)
    _, kv_heads, tokens, _, head_dim = cache.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    splits = _splits(batch * kv_heads, qkv.device)
    partial = qkv.new_empty(batch, heads, splits, head_dim, dtype=torch.float32)
    sums = qkv.new_empty(batch, heads, splits, dtype=torch.float32)
    group = heads // kv_heads
    _attend[(batch, kv_heads, splits)](
        qkv,
        cache,
        tables,
        lengths,
        partial,
        sums,
        head_dim**-0.5 * 1.4426950408889634,  # for powers of 2 in place of e
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        # What the tensor cores take at least.
        PADDED=max(16, triton.next_power_of_2(group)),
        DIM=head_dim,
        TOKENS=tokens,
        KEYS=_KEYS,
        SPLITS=splits,
        num_warps=4,
        num_stages=3,
    )
    out = qkv.new_empty(batch, heads * head_dim)
    _combine[(batch * heads,)](partial, sums, out, DIM=head_dim, SPLITS=splits, num_warps=8)
    return out


def _splits(groups: int, device: torch.device) -> int:
    """Parts of each sequence, a power of two: a few programs for every multiprocessor."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, groups)
    return min(_MOST_SPLITS, triton.next_power_of_2(wanted))


@triton.jit
def _copy(source, target, COPIED: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COPIED + tl.arange(0, COPIED)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def _add_rms_norm(x, residual, weight, out, eps, HIDDEN: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    inside = column < HIDDEN
    at = tl.program_id(0) * HIDDEN + column
    total = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    total = total.to(residual.dtype.element_ty)
    tl.store(residual + at, total, mask=inside)
    wide = total.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide) / HIDDEN + eps)
    normed *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, PART: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_cache(
    qkv,
    cache,
    tables,
    lengths,
    rotary,
    norms,
    eps,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
    NORMED: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    last = tl.load(lengths + sequence) - 1
    low = tl.arange(0, HALF)
    ours = qkv + (sequence * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    one, other = tl.load(ours + low).to(tl.float32), tl.load(ours + HALF + low).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMED:
            scale = tl.rsqrt((tl.sum(one * one) + tl.sum(other * other)) / (2 * HALF) + eps)
            gain = norms + tl.where(head < HEADS, 0, 2 * HALF)
            # Rounded, as by a norm that is an operation of its own.
            one = (one * scale * tl.load(gain + low)).to(qkv.dtype.element_ty).to(tl.float32)
            other = other * scale * tl.load(gain + HALF + low)
            other = other.to(qkv.dtype.element_ty).to(tl.float32)
        cos = tl.load(rotary + last * 2 * HALF + low)
        sin = tl.load(rotary + last * 2 * HALF + HALF + low)
        one, other = one * cos - other * sin, other * cos + one * sin
    to = ours
    if head >= HEADS:
        block = tl.load(tables + sequence * table_stride + last // TOKENS).to(tl.int64)
        is_v = (head >= HEADS + KV_HEADS).to(tl.int64)
        kv_head = head - HEADS - is_v * KV_HEADS
        token = (block * KV_HEADS + kv_head) * TOKENS + last % TOKENS
        to = cache + (token * 2 + is_v) * 2 * HALF
    tl.store(to + low, one.to(qkv.dtype.element_ty))
    tl.store(to + HALF + low, other.to(qkv.dtype.element_ty))


@triton.jit
def _attend(
    qkv,
    cache,
    tables,
    lengths,
    partial,
    sums,
    scale,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    part = tl.cdiv(tl.cdiv(length, SPLITS), KEYS) * KEYS
    first = split * part
    end = tl.minimum(first + part, length)
    group, dim = tl.arange(0, PADDED), tl.arange(0, DIM)
    head = kv_head * GROUP + group
    of_q = (sequence * (GROUP + 2) * KV_HEADS + head) * DIM
    real = group < GROUP
    q = tl.load(qkv + of_q[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    best = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    result = tl.zeros([PADDED, DIM], tl.float32)
    for start in range(first, end, KEYS):
        at = start + tl.arange(0, KEYS)
        known = at < end
        block = tl.load(tables + sequence * table_stride + at // TOKENS, mask=known, other=0)
        token = (block.to(tl.int64) * KV_HEADS + kv_head) * TOKENS + at % TOKENS
        place = cache + token[:, None] * 2 * DIM + dim[None, :]
        k = tl.load(place, mask=known[:, None], other=0.0)
        v = tl.load(place + DIM, mask=known[:, None], other=0.0)
        scores = tl.where(known[None, :], tl.dot(q, tl.trans(k)) * scale, float("-inf"))
        above = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - above[:, None])
        kept = tl.exp2(best - above)
        total = total * kept + tl.sum(weights, 1)
        result = result * kept[:, None] + tl.dot(weights.to(v.dtype), v)
        best = above
    # A part without tokens has the sum 0, and weighs nothing.
    some = tl.where(total > 0, total, 1.0)
    into = (sequence * GROUP * KV_HEADS + head) * SPLITS + split
    tl.store(sums + into, tl.where(total > 0, best + tl.log2(some), float("-inf")), mask=real)
    of_partial = partial + into[:, None] * DIM + dim[None, :]
    tl.store(of_partial, result / some[:, None], mask=real[:, None])


@triton.jit
def _combine(partial, sums, out, DIM: tl.constexpr, SPLITS: tl.constexpr):
    head = tl.program_id(0)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    weight = tl.load(sums + head * SPLITS + split)
    weight = tl.exp2(weight - tl.max(weight))
    each = tl.load(partial + (head * SPLITS + split[:, None]) * DIM + dim[None, :])
    result = tl.sum(each * weight[:, None], 0) / tl.sum(weight)
    tl.store(out + head * DIM + dim, result.to(out.dtype.element_ty))

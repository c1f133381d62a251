"""Triton kernels of the drafter: what followed the longest suffix of each request's tokens.

As `pat_vllm/drafts/suffix.py` does it for one request. The first kernel scores each place of a
request's texts, the second takes the best. Import this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pat_vllm.drafts.corpus import BETWEEN_ROWS, LONGEST

BLOCK = 1024
"""Places that a program scores."""

BITS = tl.constexpr(40)
"""A score has the match's tokens above these bits, and the place, from 1, in them."""

OWN = tl.constexpr(1 << 39)
"""Added to places in the own text, which comes after the others."""


def draft(
    tokens: torch.Tensor,
    states: torch.Tensor,
    lengths: torch.Tensor,
    sampled: torch.Tensor,
    last_sampled: torch.Tensor,
    others: torch.Tensor,
    longest_other: int,
    scores: torch.Tensor,
    drafts: torch.Tensor,
    shortest: int,
) -> None:
    """Draft for each request of a step. Two launches; nothing waits for them.

    Args:
        tokens: own texts by request state, int32 [states, longest], rows without gaps.
        states: request state of each request, int64 or int32 [requests].
        lengths: tokens of the own texts, int32 [states].
        sampled: tokens that the step gave each request, int32 [requests]. With 0 it gets no draft.
        last_sampled: what stands where there is no draft, int64 [states].
        others: address and tokens of each request's other texts, int64 [at least requests, 2]; the
            texts are int32, as `pat_vllm.drafts.suffix.draft` takes them.
        longest_other: the most of these tokens.
        scores: room, int64 [at least requests, at least `score_blocks`].
        drafts: the result, int64 [requests, k].
        shortest: tokens of a match below which nothing is drafted; at least 1.
    """
    requests, k = drafts.shape
    if not requests:
        return
    blocks = score_blocks(tokens.shape[1], longest_other)
    assert blocks <= scores.shape[1]
    score_kernel[requests, blocks](
        tokens,
        tokens.stride(0),
        states,
        lengths,
        sampled,
        others,
        scores,
        scores.stride(0),
        triton.cdiv(longest_other, BLOCK),
        SHORTEST=shortest,
        LONGEST=LONGEST,
        BETWEEN=BETWEEN_ROWS,
        BLOCK=BLOCK,
    )
    draft_kernel[(requests,)](
        tokens,
        tokens.stride(0),
        states,
        lengths,
        last_sampled,
        others,
        scores,
        scores.stride(0),
        blocks,
        drafts,
        K=k,
        K_ROOM=triton.next_power_of_2(k),
        BETWEEN=BETWEEN_ROWS,
        BLOCK=BLOCK,
    )


def score_blocks(longest_own: int, longest_other: int) -> int:
    """Blocks of places of a request."""
    return triton.cdiv(longest_own, BLOCK) + triton.cdiv(longest_other, BLOCK)


@triton.jit(do_not_specialize=["stride", "score_stride", "others_blocks"])
def score_kernel(
    tokens,  # int32 [states, stride], own texts by request state
    stride,
    states,  # int32 [requests], request state of each request of the step
    lengths,  # int32 [states]
    sampled,  # int32 [requests]; requests with 0 get no draft
    others,  # int64 [requests, 2], address and tokens of each request's other texts
    scores,  # int64 [requests, score_stride]
    score_stride,
    others_blocks,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BETWEEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score of a block of places: first those of the other texts, then of the own one."""
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1).to(tl.int64)
    state = tl.load(states + request).to(tl.int64)
    own = tokens + state * stride
    size = tl.load(lengths + state).to(tl.int64)
    in_own = block >= others_blocks
    text, count, first = own, size, block - others_blocks
    if not in_own:
        text = tl.load(others + 2 * request).to(tl.pointer_type(tl.int32))
        count = tl.load(others + 2 * request + 1)
        first = block
    place = first * BLOCK + tl.arange(0, BLOCK)
    best = tl.zeros((), tl.int64)
    if (first * BLOCK < count - 1) & (tl.load(sampled + request) > 0):
        following = tl.load(text + place + 1, mask=place < count - 1, other=BETWEEN)
        alive = (place < count - 1) & (following != BETWEEN)
        match = tl.zeros([BLOCK], tl.int64)
        length = tl.zeros((), tl.int64)
        going = 1
        while going > 0:
            last = tl.load(own + size - 1 - length)
            back = place - length
            inside = alive & (back >= 0)
            alive = inside & (tl.load(text + back, mask=inside, other=BETWEEN) == last)
            match += alive.to(tl.int64)
            length += 1
            going = tl.max(alive.to(tl.int32), axis=0)
            if (length >= LONGEST) | (length >= size):
                going = 0
        score = (match << BITS) + place + 1
        if in_own:
            score += OWN
        best = tl.max(tl.where(match >= SHORTEST, score, 0), axis=0)
    tl.store(scores + request * score_stride + block, best)


@triton.jit(do_not_specialize=["stride", "score_stride", "blocks"])
def draft_kernel(
    tokens,  # as in `score_kernel`, as are the next three
    stride,
    states,
    lengths,
    last_sampled,  # int64 [states], in place of drafts that there are not
    others,
    scores,
    score_stride,
    blocks,
    drafts,  # int64 [requests, K]
    K: tl.constexpr,
    K_ROOM: tl.constexpr,
    BETWEEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draft from the place with the best score."""
    request = tl.program_id(0).to(tl.int64)
    state = tl.load(states + request).to(tl.int64)
    own = tokens + state * stride
    size = tl.load(lengths + state).to(tl.int64)
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(0, blocks, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = scores + request * score_stride
        best = tl.maximum(best, tl.load(row + at, mask=at < blocks, other=0))
    score = tl.max(best, axis=0)
    match = score >> BITS
    place = score - (match << BITS) - 1
    in_own = place >= OWN
    index = tl.arange(0, K_ROOM).to(tl.int64)
    if in_own:
        place = place - OWN
        period = tl.maximum(size - 1 - place, 1)
        # `0 * index` makes blocks of scalars: Triton's interpreter takes no mask of both.
        given = (index < period) | (match + 0 * index >= period)
        copied = tl.load(own + place + 1 + index % period, mask=given, other=BETWEEN)
    else:
        text = tl.load(others + 2 * request).to(tl.pointer_type(tl.int32))
        count = tl.load(others + 2 * request + 1)
        at = place + 1 + index
        copied = tl.load(text + at, mask=(at < count) & (score + 0 * index > 0), other=BETWEEN)
    ended = tl.cumsum((copied == BETWEEN).to(tl.int32), axis=0)
    token = tl.where((ended == 0) & (score > 0), copied.to(tl.int64), tl.load(last_sampled + state))
    tl.store(drafts + request * K + index, token, mask=index < K)

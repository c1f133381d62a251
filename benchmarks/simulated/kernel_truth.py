"""Modelled steps with a structure of GPUs' kernels, which no roofline has."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import StepShape
from pat_vllm.simulator.truth import ReplayedTruth

_CAPTURED, _TILE = (1, 2, 4, *range(8, 136, 8)), 64
"""Tokens: vLLM's capture sizes, and above 128, where products are computed by tiles, theirs."""

_MULTIPROCESSORS, _LEAST_SPLIT = 132, 256
"""Of an H100; tokens of a context that are not split any more."""

_HOST_SECONDS, _HOST_SECONDS_EACH = 4e-3, 5e-6
"""Of a step, and of each of its tokens: scheduling, inputs, launches."""


class KernelTruth(ReplayedTruth):
    """A profile's steps with that structure; nothing of it is measured.

    A step is padded to the next number of tokens that a CUDA graph was captured for, and beyond to
    whole tiles of a matrix product. Attention with split KV runs in waves of a block for each
    multiprocessor, the last of which takes as long as a full one. No step is shorter than what the
    host does for it. Constants are assumptions, for 8 KV heads.
    """

    def decode_seconds(self, layout: Layout, shape: StepShape) -> float:
        tokens = shape.batch + shape.drafts
        batch = math.ceil(shape.batch * _padded(tokens) / tokens)
        drafts = shape.drafts * batch // shape.batch
        padded = replace(shape, batch=batch, drafts=drafts)
        short = super().decode_seconds(layout, replace(padded, context=batch))
        attention = super().decode_seconds(layout, padded) - short
        blocks = shape.batch * max(1, 8 // layout.tp)
        attention /= _busy_share(blocks, shape.context // shape.batch // _LEAST_SPLIT)
        return max(short + attention, _HOST_SECONDS + _HOST_SECONDS_EACH * tokens)


def _padded(tokens: int) -> int:
    return next((one for one in _CAPTURED if one >= tokens), -(-tokens // _TILE) * _TILE)


@lru_cache(100_000)
def _busy_share(blocks: int, most_splits: int) -> float:
    """Of the multiprocessors over all waves. FlashAttention splits where blocks are few."""
    few = blocks < 0.8 * _MULTIPROCESSORS
    splits = range(1, max(1, min(most_splits, _MULTIPROCESSORS)) + 1 if few else 2)
    waves = ((blocks * n, -(-blocks * n // _MULTIPROCESSORS)) for n in splits)
    return max(done / (count * _MULTIPROCESSORS) for done, count in waves)

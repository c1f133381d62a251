"""The null block, which no request has, and what other layouts leave in it."""

from __future__ import annotations

from typing import Any

import torch

import pat_vllm
from pat_vllm.layout import Layout
from pat_vllm.models.kinds import NULL_BLOCK


def spoil_null_blocks(llm: Any) -> bool:
    """Fill those of the active layout with NaN; returns whether they were zero."""
    layout = pat_vllm.report(llm).layout
    return all(llm.collective_rpc(_spoil, args=(layout,)))


def _spoil(worker: Any, layout: Layout) -> bool:
    views = worker._runtimes[layout].connector.kv_caches.values()
    blocks = [view[NULL_BLOCK].view(torch.int8) for view in views]
    clear = not any(block.any() for block in blocks)
    for block in blocks:
        block.fill_(-1)  # NaN in every floating-point type
    return clear

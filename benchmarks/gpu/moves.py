"""Ceilings and the parts of a switch, as `pat-vllm doctor` measures them, at every scale."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.shapes import Scale
from pat_vllm.doctor.speed import ceiling, kv_blocks, reshard
from pat_vllm.doctor.speed.timing import Stopwatch
from pat_vllm.layout import Layout


def ceilings(stopwatch: Stopwatch, scale: Scale) -> dict[str, Any]:
    """By torch, and on a GPU by Triton."""
    more: Mapping[str, ceiling.Copy] = {}
    if stopwatch.device.type == "cuda":
        from benchmarks.gpu.triton_ops import copy

        more = {"triton": copy}
    return ceiling.measure(stopwatch, scale.copies, more)


def rows_of_weights(stopwatch: Stopwatch, scale: Scale, copy_rate: float) -> dict[str, Any]:
    """In-place reshards of every model."""
    rows: list[dict[str, Any]] = []
    for shape in scale.models:
        rows += reshard.measure(stopwatch, shape.name, shape, scale.layouts, scale.ranks, copy_rate)
    return {"restored": "every walk, byte for byte", "rows": rows}


def kv(stopwatch: Stopwatch, scale: Scale, copy_rate: float) -> dict[str, Any]:
    """Pack and unpack for every number of requests and tokens whose KV fits."""
    shape = scale.models[0]
    bound = scale.kv_bytes
    if stopwatch.device.type == "cuda":
        bound = min(bound, torch.cuda.mem_get_info(stopwatch.device)[0] * 6 // 10)
    memory = torch.empty(bound // 8, dtype=torch.int64, device=stopwatch.device)
    rows: list[dict[str, Any]] = []
    skipped = set()
    for requests, tokens, wide in product(scale.requests, scale.tokens, scale.wide):
        case = kv_blocks.Case(shape, Layout(1, wide), Layout(wide, 1), requests, tokens)
        if case.words > len(memory):
            skipped.add((requests, tokens))
        else:
            rows += kv_blocks.measure(stopwatch, memory[: case.words], case, copy_rate)
    left_out = [f"{requests} x {tokens}" for requests, tokens in sorted(skipped)]
    return {"model": shape.name, "more_than_fits": left_out, "rows": rows}

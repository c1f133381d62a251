"""Packing and unpacking KV blocks, as a switch does it: layer by layer, all layers, both ways.

Seen from rank 0 of an engine that goes from N replicas (tp=1) to one group (tp=N), or back. Blocks
are scattered over the pool, as they are in an engine that has run for a while.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from benchmarks.gpu.shapes import BLOCK, ModelShape, Scale, random_like
from benchmarks.gpu.timing import Stopwatch
from pat_vllm.kernels.kv import IndexedBlocks, Piece, StagedBlocks, staged_blocks
from pat_vllm.kv_transfer.plan import RankMoves, RequestBlocks, plan_moves
from pat_vllm.layout import Layout

CACHE_LAYOUTS = ("heads first", "tokens first")
"""How a block lies in memory: [heads, tokens, content], or [tokens, heads, content]."""


def measure(stopwatch: Stopwatch, scale: Scale, copy_rate: float) -> dict[str, Any]:
    """Pack and unpack for every number of requests and tokens whose KV fits.

    Args:
        copy_rate: the copy ceiling, bytes read plus bytes written per second.
    """
    shape = scale.models[0]
    bound = scale.kv_bytes
    if stopwatch.device.type == "cuda":
        bound = min(bound, torch.cuda.mem_get_info(stopwatch.device)[0] * 6 // 10)
    memory = random_like(torch.empty(bound // 8, dtype=torch.int64, device=stopwatch.device))
    rows: list[dict[str, Any]] = []
    skipped = []
    for requests in scale.requests:
        for tokens in scale.tokens:
            if requests * tokens * _token_bytes(shape) > memory.nbytes:
                skipped.append(f"{requests} x {tokens}")
                continue
            for wide in scale.wide:
                case = _Case(shape, requests, tokens, wide)
                rows += _measure_case(stopwatch, memory, case, copy_rate)
    return {"model": shape.name, "more_than_fits": skipped, "rows": rows}


@dataclass(frozen=True)
class _Case:
    """KV of `requests` with `tokens` each on rank 0, and on each of its peers."""

    shape: ModelShape
    requests: int
    tokens: int
    wide: int

    def views(self, memory: torch.Tensor, layout: Layout, cache_layout: str) -> list[torch.Tensor]:
        """Each layer's KV on a rank: [blocks, heads, tokens, content], in 8-byte words."""
        heads = layout.kv_heads_per_rank(self.shape.kv_heads)
        content = 2 * self.shape.head_dim * torch.bfloat16.itemsize // 8
        each = self.requests * self.tokens * self.shape.kv_heads * content
        layers = memory[: self.shape.layers * each].view(self.shape.layers, each)
        if cache_layout == "heads first":
            return [layer.view(-1, heads, BLOCK, content) for layer in layers]
        return [layer.view(-1, BLOCK, heads, content).transpose(1, 2) for layer in layers]

    def moves(self, source: Layout, target: Layout) -> RankMoves:
        """What rank 0 sends and receives."""
        rng = random.Random(0)
        count = self.tokens // BLOCK

        def pools(layout: Layout) -> list[Iterator[int]]:
            """Each replica's blocks, in the order in which requests get them."""
            blocks = self.wide * self.requests * count // layout.replicas
            return [iter(rng.sample(range(blocks), blocks)) for _ in range(layout.replicas)]

        source_pools, target_pools = pools(source), pools(target)
        found = []
        for index in range(self.wide * self.requests):
            one = index // self.requests
            a, b = min(one, source.replicas - 1), min(one, target.replicas - 1)
            held, wanted = (tuple(islice(p, count)) for p in (source_pools[a], target_pools[b]))
            found.append(RequestBlocks(f"{index}", a, held, b, wanted))
        moves = plan_moves(source, target, self.shape.kv_heads, found)
        return RankMoves.of(0, source.world_size, moves)


def _measure_case(
    stopwatch: Stopwatch, memory: torch.Tensor, case: _Case, copy_rate: float
) -> Iterator[dict[str, Any]]:
    narrow, wide = Layout(1, case.wide), Layout(case.wide, 1)
    for source, target in ((narrow, wide), (wide, narrow)):
        moves = case.moves(source, target)
        sides = (
            ("pack", source, _pieces_sent(moves)),
            ("unpack", target, _pieces_received(moves)),
        )
        for cache_layout in CACHE_LAYOUTS:
            for what, layout, pieces in sides:
                views = case.views(memory, layout, cache_layout)
                begun = time.perf_counter()
                blocks = staged_blocks(pieces, views[0])
                stopwatch.synchronize()
                tables = time.perf_counter() - begun
                size = sum(blocks.counts)
                staged = torch.empty(size, dtype=torch.int64, device=memory.device)
                _check(pieces, blocks, views[0], staged)
                run = partial(_pack if what == "pack" else _unpack, blocks, views, staged)
                timing = stopwatch.measure(run)
                moved = 2 * case.shape.layers * staged.nbytes
                yield {
                    "direction": f"{source} to {target}",
                    "what": what,
                    "cache_layout": cache_layout,
                    "requests": case.requests,
                    "tokens": case.tokens,
                    "bytes_read_and_written": moved,
                    **timing.to_json(),
                    "share_of_copy": moved / timing.median / copy_rate,
                    "tables_ms": round(tables * 1e3, 3),
                }


def _pack(blocks: StagedBlocks, views: Sequence[torch.Tensor], staged: torch.Tensor) -> None:
    for view in views:
        blocks.pack(view, staged)


def _unpack(blocks: StagedBlocks, views: Sequence[torch.Tensor], staged: torch.Tensor) -> None:
    parts = staged.split(blocks.counts)
    for view in views:
        blocks.unpack(parts, view)


def _check(
    by_peer: Sequence[Sequence[Piece]],
    blocks: StagedBlocks,
    view: torch.Tensor,
    staged: torch.Tensor,
) -> None:
    """That one layer is packed as torch's indexing does it, and that unpacking brings it back."""
    reference = torch.full_like(staged, -1)
    IndexedBlocks(by_peer, view).pack(view, reference)
    staged.fill_(-2)
    blocks.pack(view, staged)
    assert torch.equal(staged, reference), "blocks are packed wrongly"
    random_like(reference)
    blocks.unpack(reference.split(blocks.counts), view)
    blocks.pack(view, staged)
    assert torch.equal(staged, reference), "blocks are unpacked wrongly"


def _pieces_sent(moves: RankMoves) -> list[list[Piece]]:
    return [[(m.source_blocks, m.route.source_heads) for m in peer] for peer in moves.sends]


def _pieces_received(moves: RankMoves) -> list[list[Piece]]:
    return [[(m.target_blocks, m.route.target_heads) for m in peer] for peer in moves.receives]


def _token_bytes(shape: ModelShape) -> int:
    """KV bytes of a token over all layers and heads."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * torch.bfloat16.itemsize

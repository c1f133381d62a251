"""Packing and unpacking KV blocks, as a switch does it: layer by layer, all layers, both ways.

Seen from rank 0 of an engine that goes from a narrow layout to a wide one, or back. Blocks are
scattered over the pool, as they are in an engine that has run for a while.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, permutations, product
from typing import Any

import torch

from benchmarks.gpu.ceiling import random_like
from benchmarks.gpu.report import slowest
from benchmarks.gpu.timing import Scale, Stopwatch, milliseconds
from pat_vllm.kernels.kv import IndexedBlocks, Piece, StagedBlocks, staged_blocks
from pat_vllm.kv_transfer.plan import RankMoves, RequestBlocks, plan_moves
from pat_vllm.layout import Layout
from pat_vllm.models.kinds import FullAttention
from pat_vllm.models.model_size import ModelSize

BLOCK = 16
"""Tokens of a KV block."""

CACHE_LAYOUTS = ("heads first", "tokens first")
"""How a block lies in memory: [heads, tokens, content], or [tokens, heads, content]."""


def measure(stopwatch: Stopwatch, scale: Scale, copy_rate: float) -> dict[str, Any]:
    """Pack and unpack in both directions, with either way to lay out a block.

    Every number of requests and tokens is measured whose KV fits.

    Args:
        copy_rate: the copy ceiling, bytes read plus bytes written per second.

    Raises:
        AssertionError: what was packed or unpacked is wrong.
    """
    bound = scale.kv_bytes
    if stopwatch.device.type == "cuda":
        bound = min(bound, torch.cuda.mem_get_info(stopwatch.device)[0] * 6 // 10)
    memory = torch.empty(bound // 8, dtype=torch.int64, device=stopwatch.device)
    rows: list[dict[str, Any]] = []
    skipped = set()
    for requests, tokens, wide in product(scale.requests, scale.tokens, scale.wide):
        case = Case(scale.model, Layout(1, wide), Layout(wide, 1), requests, tokens)
        if case.words > len(memory):
            skipped.add((requests, tokens))
        else:
            rows += _measure_case(stopwatch, random_like(memory[: case.words]), case, copy_rate)
    left_out = ", ".join(f"{requests} x {tokens} tokens" for requests, tokens in sorted(skipped))
    about = f"{scale.model.layers} layers, one launch for each; the slower direction. "
    return {
        "about": f"{about}Left out, as more than fits: {left_out or 'nothing'}.",
        "tables": [slowest(rows, ("requests", "tokens", "what", "cache_layout"))],
    }


@dataclass(frozen=True)
class Case:
    """KV of `requests` with `tokens` each in every replica of the narrow layout.

    Attributes:
        tokens: a multiple of `BLOCK`.
    """

    model: ModelSize
    narrow: Layout
    wide: Layout
    requests: int
    tokens: int

    @property
    def words(self) -> int:
        """8-byte words of all layers' KV on rank 0."""
        return self.model.layers * max(map(self._words_of_layer, (self.narrow, self.wide)))

    @property
    def _content(self) -> int:
        """Words of a token and head: K and V."""
        return 2 * self.model.head_dim * torch.bfloat16.itemsize // 8

    def _blocks(self, layout: Layout) -> int:
        """That a replica holds."""
        every = self.narrow.replicas * self.requests
        return every // layout.replicas * (self.tokens // BLOCK)

    def _words_of_layer(self, layout: Layout) -> int:
        heads = layout.kv_heads_per_rank(self.model.kv_heads)
        return self._blocks(layout) * heads * BLOCK * self._content

    def views(self, memory: torch.Tensor, layout: Layout, cache_layout: str) -> list[torch.Tensor]:
        """Each layer's KV on a rank: [blocks, heads, tokens, content], in 8-byte words."""
        heads = layout.kv_heads_per_rank(self.model.kv_heads)
        each = self._words_of_layer(layout)
        layers = memory[: self.model.layers * each].view(self.model.layers, each)
        if cache_layout == "heads first":
            return [layer.view(-1, heads, BLOCK, self._content) for layer in layers]
        return [layer.view(-1, BLOCK, heads, self._content).transpose(1, 2) for layer in layers]

    def moves(self, source: Layout, target: Layout) -> RankMoves:
        """What rank 0 sends and receives."""
        rng = random.Random(0)
        count = self.tokens // BLOCK

        def pools(layout: Layout) -> list[Iterator[int]]:
            """Each replica's blocks, in the order in which requests get them."""
            blocks = self._blocks(layout)
            return [iter(rng.sample(range(blocks), blocks)) for _ in range(layout.replicas)]

        source_pools, target_pools = pools(source), pools(target)
        every = self.narrow.replicas * self.requests
        requests = []
        for index in range(every):
            # A wide replica takes over the requests of the narrow ones that are within it.
            narrow = index // self.requests
            a, b = narrow % source.replicas, narrow % target.replicas
            held, wanted = (tuple(islice(p, count)) for p in (source_pools[a], target_pools[b]))
            requests.append(RequestBlocks(f"{index}", a, held, b, wanted))
        kinds = (FullAttention(self.model.kv_heads, BLOCK),)
        moves = plan_moves(source, target, kinds, requests)
        return RankMoves.of(0, source.world_size, moves)


def _measure_case(
    stopwatch: Stopwatch, memory: torch.Tensor, case: Case, copy_rate: float
) -> Iterator[dict[str, Any]]:
    for source, target in permutations((case.narrow, case.wide)):
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
                moved = 2 * case.model.layers * staged.nbytes
                yield {
                    "direction": f"{source} to {target}",
                    "what": what,
                    "cache_layout": cache_layout,
                    "requests": case.requests,
                    "tokens": case.tokens,
                    "GB moved": moved / 1e9,
                    **milliseconds(timing),
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
    """That one layer is packed as torch's indexing does it, and that unpacking brings it back.

    A head that several ranks hold is in several pieces, with the same contents.
    """
    reference = torch.full_like(staged, -1)
    IndexedBlocks(by_peer, view).pack(view, reference)
    staged.fill_(-2)
    blocks.pack(view, staged)
    assert torch.equal(staged, reference), "blocks are packed wrongly"
    view.zero_()
    blocks.unpack(reference.split(blocks.counts), view)
    blocks.pack(view, staged)
    assert torch.equal(staged, reference), "blocks are unpacked wrongly"


def _pieces_sent(moves: RankMoves) -> list[list[Piece]]:
    return [[(m.source_blocks, m.route.source_heads) for m in peer] for peer in moves.sends]


def _pieces_received(moves: RankMoves) -> list[list[Piece]]:
    return [[(m.target_blocks, m.route.target_heads) for m in peer] for peer in moves.receives]

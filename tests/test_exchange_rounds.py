"""A switch that moves much of the KV cache stages a layer that is sent, and rounds that arrive."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.kv_transfer import exchange as exchange_module
from pat_vllm.kv_transfer.exchange import CollectiveTransport, Exchange
from pat_vllm.kv_transfer.plan import ROUNDS, BlockMove, RankMoves, RequestBlocks, plan_moves
from pat_vllm.layout import Layout
from tests.support.mutation import mutated
from tests.test_exchange import CPU, _copy, _run_ranks

TOKENS, CONTENT, LAYERS = 2, 4, 3
RANKS, KV_HEADS, BLOCKS = 4, 4, 256
"""Blocks of the layout in which a block has all heads."""


def full_switch(source: Layout, target: Layout, seed: int, share: float = 1.0) -> list[BlockMove]:
    """Moves of a share of the KV cache, from any blocks to any blocks."""
    rng = random.Random(seed)

    def places(layout: Layout) -> list[tuple[int, int]]:
        found = [
            (replica, block)
            for replica in range(layout.replicas)
            for block in range(num_blocks(layout))
        ]
        rng.shuffle(found)
        return found

    pairs = zip(places(source), places(target), strict=True)
    requests = [
        RequestBlocks(f"r{index}", a[0], (a[1],), b[0], (b[1],))
        for index, (a, b) in enumerate(pairs)
        if rng.random() < share
    ]
    return plan_moves(source, target, KV_HEADS, requests)


def num_blocks(layout: Layout) -> int:
    return BLOCKS * KV_HEADS // layout.kv_heads_per_rank(KV_HEADS)


def views(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    heads = layout.kv_heads_per_rank(KV_HEADS)
    layers = buffer.view(torch.float32).view(LAYERS, -1)
    return [one.view(num_blocks(layout), heads, TOKENS, CONTENT) for one in layers]


# -------------------------------------------------------------------- the plan


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_rounds_have_every_move_once_and_on_both_sides_alike(
    seed: int, rounds: int, tp: int
) -> None:
    moves = full_switch(Layout.of(tp, RANKS), Layout.of(4 if tp < 4 else 1, RANKS), seed, 0.2)
    of_ranks = [RankMoves.of(rank, RANKS, moves).split(rounds) for rank in range(RANKS)]
    for i in range(rounds):
        for a in range(RANKS):
            for b in range(RANKS):
                assert of_ranks[a][i].sends[b] == of_ranks[b][i].receives[a]
    for rank, parts in enumerate(of_ranks):
        whole = RankMoves.of(rank, RANKS, moves)
        for peer in range(RANKS):
            cells = [cell for one in parts for cell in cells_of(one.sends[peer])]
            assert sorted(cells) == sorted(cells_of(whole.sends[peer]))


def cells_of(moves: tuple[BlockMove, ...]) -> list[tuple[int, int, int, int]]:
    return [
        (source, head, target, to)
        for move in moves
        for source, target in zip(move.source_blocks, move.target_blocks, strict=True)
        for head, to in zip(move.route.source_heads, move.route.target_heads, strict=True)
    ]


# -------------------------------------------------------------------- the exchange


class Watched(CollectiveTransport):
    """Knows what buffers it has had at most."""

    def __init__(self) -> None:
        super().__init__(dist.group.WORLD, CPU)
        self.most = 0

    def begin(self) -> None:
        super().begin()
        self.most = max(self.most, sum(one.nbytes for one in self._kept.values()))


def check_switch(rank: int, source: Layout, target: Layout, seed: int, share: float) -> bool:
    """Every byte arrives, and staging stays within what is kept free. Whether rounds were made."""
    transport = Watched()
    exchange = Exchange(dist.group.WORLD, CPU, transport)
    moves = full_switch(source, target, seed, share)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    size = LAYERS * BLOCKS * KV_HEADS * TOKENS * CONTENT * 4
    buffer = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    buffers = [torch.empty_like(buffer) for _ in range(RANKS)]
    dist.all_gather(buffers, buffer)
    expected = buffer.clone()
    old, new = [views(one, source) for one in buffers], views(expected, target)
    for move in moves:
        if move.route.target_rank == rank:
            _copy(move, old[move.route.source_rank], new)

    mine = RankMoves.of(rank, RANKS, moves)
    sources, targets = views(buffer, source), views(buffer, target)
    with exchange.staging(mine, sources[0], targets[0]):
        for a, b in zip(sources, targets, strict=True):
            exchange.run(a, b)
        packed = exchange._packed.nbytes
        in_rounds = bool(exchange._rounds)
    sent = sum(
        len(move.source_blocks) * len(move.route.source_heads)
        for move in moves
        if move.route.source_rank == rank
    )
    cell = TOKENS * CONTENT * 4
    problems = {
        "bytes": not torch.equal(buffer, expected),
        "counted": exchange.bytes_sent != LAYERS * sent * cell,
        "kept": bool(transport._kept) or exchange._packed.numel() != 0,
    }
    layer = size // LAYERS
    # A round may have a block more of each move than its share.
    slack = 2 * sum(len(move.route.source_heads) * cell for move in moves)
    problems["staging"] = packed + transport.most > layer * (1 + 2 / ROUNDS) + slack
    # All ranks go on, whatever one has found, so that none waits for another.
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, (problems, in_rounds))
    wrong = [one for one, _ in found if any(one.values())]
    assert not wrong, wrong
    assert len({one for _, one in found}) == 1, "some ranks exchange in rounds, and some do not"
    return in_rounds


MISTAKES: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "a round is written before all is packed": (
        Exchange._run_rounds,
        {
            "packs.pack(source, part)\n    for (packs, un": "pass\n    for (packs, un",
            "self._transport.send.copy_(part)": "packs.pack(source, self._transport.send)",
        },
    ),
    "all of a layer is one round": (
        Exchange._prepare_rounds,
        {"moves.split(ROUNDS)": "moves.split(1)"},
    ),
    "two layers may always be staged": (
        Exchange.staging,
        {"moves.most_staged * source[0, 0].nbytes > room": "False"},
    ),
    "buffers are not given back": (CollectiveTransport.release, {"self._kept.clear()": "pass"}),
}


def _switches(rank: int, world_size: int) -> None:
    layouts = [Layout.of(tp, world_size) for tp in (1, 2, 4)]
    for seed, (source, target) in enumerate((a, b) for a in layouts for b in layouts if a is not b):
        assert check_switch(rank, source, target, seed, share=1.0)
        assert not check_switch(rank, source, target, seed, share=0.3)
    for mistake in MISTAKES:
        function, changes = MISTAKES[mistake]
        with mutated(function, changes), pytest.raises(AssertionError):
            check_switch(rank, layouts[0], layouts[2], seed=7, share=1.0)
            raise SystemExit(f"not seen: {mistake}")


def test_full_switches_and_mistakes_in_them(tmp_path: Any) -> None:
    _run_ranks(_switches, RANKS, tmp_path)


def test_largest_of_each_peer() -> None:
    assert exchange_module._largest([[1, 5], [3, 2]]) == [3, 5]

"""A plan of moves, cut into rounds."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.kv_transfer.plan import BlockMove, RankMoves, RequestBlocks, plan_moves
from pat_vllm.layout import Layout
from tests.support.kinds import full

RANKS, KV_HEADS, BLOCKS = 4, 4, 256
"""Blocks of the layout in which a block has all heads."""


def num_blocks(layout: Layout) -> int:
    return BLOCKS * KV_HEADS // layout.kv_heads_per_rank(KV_HEADS)


def full_switch(source: Layout, target: Layout, seed: int, share: float = 1.0) -> list[BlockMove]:
    """Moves of a share of the KV cache, from any blocks to any blocks."""
    rng = random.Random(seed)

    def places(layout: Layout) -> list[tuple[int, int]]:
        every = [
            (replica, block)
            for replica in range(layout.replicas)
            for block in range(num_blocks(layout))
        ]
        rng.shuffle(every)
        return every

    pairs = zip(places(source), places(target), strict=True)
    requests = [
        RequestBlocks(f"r{index}", a[0], (a[1],), b[0], (b[1],))
        for index, (a, b) in enumerate(pairs)
        if rng.random() < share
    ]
    return plan_moves(source, target, full(KV_HEADS), requests)


def cells_of(moves: tuple[BlockMove, ...]) -> list[tuple[int, int, int, int]]:
    return [
        (source, head, target, to)
        for move in moves
        for source, target in zip(move.source_blocks, move.target_blocks, strict=True)
        for head, to in zip(move.route.source_heads, move.route.target_heads, strict=True)
    ]


@settings(max_examples=15)
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
            cells = [cell for part in parts for cell in cells_of(part.sends[peer])]
            assert sorted(cells) == sorted(cells_of(whole.sends[peer]))
            sizes = [len(cells_of(part.sends[peer])) for part in parts]
            # Of about equal size: each move may have a block more or less.
            assert max(sizes) - min(sizes) <= KV_HEADS * max(1, len(whole.sends[peer]))

"""In-place reshard of a model's weights: rows of all layers' fused matrices change places.

Only qkv and gate-up matrices take part: the shards of all others are views of the whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any

import torch

from benchmarks.gpu.ceiling import random_like
from benchmarks.gpu.report import slowest
from benchmarks.gpu.shapes import LAYOUTS, Scale
from benchmarks.gpu.timing import Stopwatch, milliseconds
from pat_vllm.kernels.swap import ByteSwaps, RowSwap, prepare
from pat_vllm.models.model_size import ModelSize
from pat_vllm.weights.row_order import Block, RowOrder, block_of, common_unit, rounds
from pat_vllm.weights.shards import EvenPartition, Partition, QKVPartition, pieces_of


def measure(stopwatch: Stopwatch, scale: Scale, copy_rate: float) -> dict[str, Any]:
    """Reshard every model between every two layouts, in both directions, on some of the ranks.

    What has to move depends on where a rank comes from, too. So each walk begins in the base
    layout, with rows in their original order, goes to one or two other layouts, and ends in the
    base layout. There the weights are compared with the original ones, byte for byte.

    Args:
        copy_rate: the copy ceiling, bytes read plus bytes written per second.

    Raises:
        AssertionError: a row is not where it should be.
    """
    rows: list[dict[str, Any]] = []
    for name, model in scale.models.items():
        weights = _Weights(model, stopwatch.device)
        for rank in scale.ranks:
            for walk in _walks():
                measured = _measure_walk(stopwatch, weights, rank, walk, copy_rate)
                rows += [{"model": name, **row} for row in measured]
        del weights
    return {
        "about": (
            "Rows of all layers' fused matrices trade places; the slowest of the ranks and ways "
            "measured. Restored byte for byte at the end of every walk."
        ),
        "tables": [slowest(rows, ("model", "source", "target"))],
    }


_BASE = LAYOUTS[0]


class _Weights:
    """The fused matrices of all layers, as one device holds them in the base layout."""

    def __init__(self, model: ModelSize, device: torch.device) -> None:
        self.partitions: dict[str, Partition] = {
            "qkv": QKVPartition(model.heads, model.kv_heads, model.head_dim, model.head_dim),
            "gate_up": EvenPartition((model.intermediate, model.intermediate)),
        }
        self.tensors: dict[str, list[torch.Tensor]] = {}
        for name, partition in self.partitions.items():
            size = partition.shard(_BASE.tp, 0).size, model.hidden
            self.tensors[name] = [
                random_like(torch.empty(size, dtype=torch.bfloat16, device=device))
                for _ in range(model.layers)
            ]
        self.original = {
            name: [tensor.clone() for tensor in tensors] for name, tensors in self.tensors.items()
        }

    def blocks(self, rank: int) -> dict[str, dict[int, Block]]:
        """Where each layout's shard is brought together, by matrix and tp."""
        blocks = {}
        tp_ranks = {layout.tp: layout.tp_rank_of(rank) for layout in LAYOUTS}
        for name, partition in self.partitions.items():
            whole = partition.shard(_BASE.tp, tp_ranks[_BASE.tp])
            pieces = {tp: pieces_of(partition.shard(tp, at), whole) for tp, at in tp_ranks.items()}
            unit = common_unit(whole.size, pieces.values())
            blocks[name] = {tp: block_of(of_tp, whole.size, unit) for tp, of_tp in pieces.items()}
        return blocks

    def check(self, blocks: Mapping[str, Block]) -> None:
        """That the block of each matrix is the shard, as cut out of the original."""
        for name, block in blocks.items():
            units = torch.tensor(block.units, device=self.tensors[name][0].device)
            for tensor, original in zip(self.tensors[name], self.original[name], strict=True):
                shard = tensor[block.start : block.start + block.size]
                expected = original.unflatten(0, (-1, block.unit))[units].flatten(0, 1)
                assert _same(shard, expected), f"the shard of {name} is wrong"

    def check_restored(self) -> None:
        """That everything is where it was."""
        for name, tensors in self.tensors.items():
            assert all(map(_same, tensors, self.original[name])), f"{name} is not as it was"


def _walks() -> Iterator[tuple[int, ...]]:
    """Ways from the base layout and back by which every layout is reached from every other."""
    base, *others = (layout.tp for layout in LAYOUTS)
    yield from ((base, tp, base) for tp in others)
    yield from ((base, a, b, base) for a, b in permutations(others, 2))


def _measure_walk(
    stopwatch: Stopwatch,
    weights: _Weights,
    rank: int,
    walk: Sequence[int],
    copy_rate: float,
) -> list[dict[str, Any]]:
    blocks = weights.blocks(rank)
    begun = time.perf_counter()
    moves = [_plan(weights, blocks, source, target) for source, target in pairwise(walk)]
    planning = (time.perf_counter() - begun) / len(moves)

    for tp, move in zip(walk[1:], moves, strict=True):
        move.run()
        weights.check({name: of_tp[tp] for name, of_tp in blocks.items()})
    weights.check_restored()
    timings = stopwatch.measure_cycle([move.run for move in moves])
    weights.check_restored()

    return [
        {
            "source": source,
            "target": target,
            "rank": rank,
            "walk": "-".join(map(str, walk)),
            "GB moved": 2 * move.num_bytes / 1e9,
            **milliseconds(timing),
            "share_of_copy": 2 * move.num_bytes / timing.median / copy_rate,
            "planning_ms": round(planning * 1e3, 2),
        }
        for (source, target), move, timing in zip(pairwise(walk), moves, timings, strict=True)
    ]


def _plan(
    weights: _Weights, blocks: Mapping[str, Mapping[int, Block]], source: int, target: int
) -> ByteSwaps:
    """One round of swaps after the other, each over all layers."""
    swaps: list[list[RowSwap]] = []
    for name, of_tp in blocks.items():
        base = next(iter(of_tp.values()))  # of all rows
        original = RowOrder.original(base.size, base.unit)
        before, after = (original.bring(of_tp[tp]) for tp in (source, target))
        for index, together in enumerate(rounds(before.swaps_to(after))):
            if index == len(swaps):
                swaps.append([])
            swaps[index] += [
                RowSwap(tensor, swap.a, swap.b, swap.length)
                for tensor in weights.tensors[name]
                for swap in together
            ]
    return prepare(swaps)


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(tensor.view(torch.int64), other.view(torch.int64))

"""Copies within device memory against plain indexing, byte for byte.

torch's way is tested here. The Triton kernels run in Triton's interpreter, in a process of its own
(`python -m tests.vllm.kernels.test_kernels`). What they are compiled to is in `tests/gpuless`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.kernels import kv, swap
from pat_vllm.kernels.column_blocks import ColumnBlock, bands_of, gather, scatter
from pat_vllm.kernels.swap import RowSwap, prepare
from tests.vllm.kernels.triton_kernels import in_interpreter, needs_triton

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)

# -------------------------------------------------------------------- swaps


def random_bytes(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = [*shape[:-1], shape[-1] * dtype.itemsize]
    return torch.randint(0, 256, wide, dtype=torch.uint8, generator=generator).view(dtype)


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def random_swaps(
    rng: random.Random, unit: int = 1
) -> tuple[list[torch.Tensor], list[list[RowSwap]]]:
    """Tensors, and rounds of swaps of them; ranges are of whole units of rows."""
    tensors, dims = [], []
    for _ in range(rng.randint(1, 4)):
        dtype, rows = rng.choice(DTYPES), unit * rng.randint(2, 40)
        before: tuple[int, ...] = rng.choice([(), (), (1,), (3,), (2, 5)])
        after = () if rng.random() < 0.3 else (rng.choice([1, 3, 8, 16, 24]),)
        tensors.append(random_bytes((*before, rows, *after), dtype, rng.randrange(2**30)))
        dims.append(len(before))
    rounds = []
    for _ in range(rng.randint(0, 3)):
        swaps = []
        for tensor, dim in zip(tensors, dims, strict=True):
            # Cut all rows into ranges, then pair some that are equally long.
            count = tensor.shape[dim] // unit
            cuts = sorted(rng.sample(range(count + 1), rng.randint(2, min(count + 1, 8))))
            ranges = [(a * unit, (b - a) * unit) for a, b in pairwise(cuts)]
            rng.shuffle(ranges)
            while len(ranges) > 1:
                (a, length), (b, other) = ranges.pop(), ranges.pop()
                swaps.append(RowSwap(tensor, a, b, min(length, other), dim))
        rng.shuffle(swaps)
        rounds.append(swaps)
    return tensors, rounds


def swapped(tensors: list[torch.Tensor], rounds: list[list[RowSwap]]) -> list[torch.Tensor]:
    """Copies of the tensors after the swaps, by plain indexing."""
    copies = [tensor.clone() for tensor in tensors]
    for swaps in rounds:
        for tensor, a, b, length, dim in swaps:
            (copy,) = (c for c, t in zip(copies, tensors, strict=True) if t is tensor)
            rows = copy.transpose(0, dim)
            kept = rows[a : a + length].clone()
            rows[a : a + length] = rows[b : b + length]
            rows[b : b + length] = kept
    return copies


def num_bytes(rounds: list[list[RowSwap]]) -> int:
    every = (row_swap for swaps in rounds for row_swap in swaps)
    return sum(2 * t.narrow(dim, a, length).nbytes for t, a, _, length, dim in every)


def check_swaps(tensors: list[torch.Tensor], rounds: list[list[RowSwap]]) -> None:
    """Prepared swaps, twice on what lies there then, and the way back: the rounds in reverse."""
    before, after = [tensor.clone() for tensor in tensors], swapped(tensors, rounds)
    forth, back = prepare(rounds), prepare(rounds[::-1])
    assert forth.num_bytes == num_bytes(rounds)
    for _ in range(2):
        forth.run()
        assert all(map(same, tensors, after))
        back.run()
        assert all(map(same, tensors, before))


@settings(max_examples=80)
@given(st.randoms(use_true_random=False), st.sampled_from([16, 96, 4096, swap._CPU_STAGING_BYTES]))
def test_swaps_are_those_of_plain_indexing_whatever_the_staging(
    rng: random.Random, staging_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "_CPU_STAGING_BYTES", staging_bytes)
        check_swaps(*random_swaps(rng))


def test_parameters_and_inference_tensors_can_be_swapped() -> None:
    with torch.inference_mode():
        of_inference = torch.arange(4.0)
    for tensor in (torch.nn.Parameter(torch.arange(4.0)), of_inference):
        prepare([[RowSwap(tensor, 0, 2, 2)]]).run()
        assert tensor.tolist() == [2.0, 3.0, 0.0, 1.0]


FIVE, TEN = torch.zeros(5, 2), torch.zeros(10, 10)


@pytest.mark.parametrize(
    ("swaps", "message"),
    [
        ([RowSwap(FIVE, 0, 4, 2)], "not inside the 5 of a tensor"),
        ([RowSwap(FIVE, -1, 2, 1)], "not inside the 5 of a tensor"),
        ([RowSwap(TEN, 0, 4, 4), RowSwap(TEN[2:], 5, 6, 1)], "overlap"),
        # A range of many rows overlaps with one that begins long before it ends.
        ([RowSwap(TEN, 0, 5, 3, dim=1), RowSwap(TEN, 2, 3, 1)], "overlap"),
        ([RowSwap(torch.zeros(4, 4).T, 0, 2, 1)], "contiguous"),
    ],
)
def test_ranges_that_are_refused(swaps: list[RowSwap], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare([swaps])


def test_what_overlaps_may_be_in_several_rounds() -> None:
    prepare([[RowSwap(TEN, 0, 4, 4)], [RowSwap(TEN[2:], 5, 6, 1)]]).run()
    prepare([[RowSwap(TEN, 0, 5, 3, dim=1), RowSwap(TEN, 3, 8, 2, dim=1)]]).run()


# -------------------------------------------------------------------- columns


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.sampled_from(DTYPES))
def test_columns_come_together_and_go_back(rng: random.Random, dtype: torch.dtype) -> None:
    """Of two matrices, which share the staging."""
    matrices, blocks, wanted = [], [], []
    for _ in range(2):
        bands, width = rng.randint(1, 6), rng.randint(1, 5)
        size = width * rng.randint(1, bands)
        rows, columns = bands_of(bands * width, size) * rng.randint(1, 4), bands * width
        step = columns // bands_of(columns, size)
        start = step * rng.randint(0, (columns - size) // step)
        matrix = random_bytes((rows, columns), dtype, rng.randrange(2**30))
        matrices.append(matrix)
        blocks.append(ColumnBlock(matrix, start, size))
        wanted.append(matrix[:, start : start + size].clone())
    before = [matrix.clone() for matrix in matrices]
    moved = gather(blocks)
    for block, columns_wanted in zip(blocks, wanted, strict=True):
        assert block.block.is_contiguous() and same(block.block, columns_wanted)
    assert scatter(blocks) == moved
    assert all(map(same, matrices, before))


@pytest.mark.parametrize(
    ("rows", "columns", "start", "size", "bands"),
    [(7, 4, 0, 2, 2), (8, 6, 1, 3, 2), (8, 12, 0, 5, 12)],
)
def test_columns_that_cannot_come_together(
    rows: int, columns: int, start: int, size: int, bands: int
) -> None:
    with pytest.raises(ValueError, match=f"{rows} x {columns} cannot be cut into {bands} bands"):
        ColumnBlock(torch.zeros(rows, columns), start, size)


# -------------------------------------------------------------------- KV blocks


def random_view(rng: random.Random, blocks: int, seed: int) -> torch.Tensor:
    """A layer's view of a KV buffer, as 8-byte words: heads first or tokens first, maybe padded."""
    heads, tokens = rng.choice([1, 2, 4, 8]), rng.choice([1, 4, 16])
    content = rng.choice([1, 2, 5, 8, 20, 64])
    if rng.random() < 0.5:
        return random_bytes((blocks, heads, tokens, content), torch.int64, seed)
    padding = rng.choice([0, 1, 2])
    memory = random_bytes((blocks, tokens, heads, content + padding), torch.int64, seed)
    return memory[..., :content].transpose(1, 2)


def random_pieces(rng: random.Random, view: torch.Tensor) -> list[list[kv.Piece]]:
    """Pieces by peer that name no block and head twice."""
    blocks, heads = list(range(view.shape[0])), view.shape[1]
    if rng.random() < 0.5:
        rng.shuffle(blocks)
    by_peer: list[list[kv.Piece]] = []
    for _ in range(rng.randint(1, 4)):
        peer: list[kv.Piece] = []
        for _ in range(rng.randint(0, 2)):
            ids, blocks = blocks[:3], blocks[3:]
            first = rng.randrange(heads)
            if ids:
                peer.append((tuple(ids), range(first, rng.randint(first + 1, heads))))
        by_peer.append(peer)
    return by_peer


def packed(view: torch.Tensor, by_peer: list[list[kv.Piece]]) -> list[torch.Tensor]:
    """What each peer gets, by plain indexing."""
    parts = []
    for pieces in by_peer:
        runs = [
            view[block, head].reshape(-1)
            for ids, heads in pieces
            for block in ids
            for head in heads
        ]
        parts.append(torch.cat(runs) if runs else view.new_empty(0))
    return parts


def check_staging(make: Any, rng: random.Random) -> None:
    """`make` is a class that does what `StagedBlocks` says."""
    view = random_view(rng, rng.randint(1, 20), rng.randrange(2**30))
    by_peer = random_pieces(rng, view)
    staged = make(by_peer, view)
    expected = packed(view, by_peer)
    assert staged.counts == [len(part) for part in expected]
    buffer = torch.full((sum(staged.counts),), -1, dtype=torch.int64)
    staged.pack(view, buffer)
    assert torch.equal(buffer, torch.cat(expected))

    new = random_bytes((len(buffer),), torch.int64, rng.randrange(2**30))
    memory = view.clone(memory_format=torch.preserve_format)
    target = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype).copy_(view)
    staged.unpack(new.split(staged.counts), target)
    position = 0
    for pieces in by_peer:
        for ids, heads in pieces:
            for block in ids:
                for head in heads:
                    end = position + memory[block, head].numel()
                    memory[block, head] = new[position:end].view(memory[block, head].shape)
                    position = end
    assert torch.equal(target, memory)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.sampled_from([0, kv._LONG_RUN_BYTES]))
def test_blocks_are_packed_and_unpacked_as_by_plain_indexing(rng: random.Random, long: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv, "_LONG_RUN_BYTES", long)
        check_staging(kv.IndexedBlocks, rng)


# -------------------------------------------------------------------- Triton's interpreter


@needs_triton
def test_triton_kernels_do_the_same_in_the_interpreter() -> None:
    assert in_interpreter("tests.vllm.kernels.test_kernels").split() == ["swaps", "blocks"]


def _in_interpreter() -> None:
    """Every pair and view goes through the kernels, though it is on CPU."""
    swap._on_gpu = lambda tensor: True
    for seed in range(20):
        check_swaps(*random_swaps(random.Random(seed), unit=16))
    # Longer than a chunk, and no multiple of one.
    long = random_bytes((50_000, 16), torch.bfloat16, 0)
    check_swaps([long], [[RowSwap(long, 3, 25_000, 20_001), RowSwap(long, 24_000, 49_000, 1)]])
    print("swaps")
    for seed in range(30):
        check_staging(kv.TableBlocks, random.Random(seed))
    print("blocks")


if __name__ == "__main__":
    _in_interpreter()

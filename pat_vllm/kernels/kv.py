"""Packs KV blocks for a transfer, and unpacks them: views of a KV cache to a flat buffer and back.

The buffer holds the pieces of all peers end to end, each as [blocks, heads, tokens, content]. On
CUDA one Triton launch copies all of them; elsewhere torch copies piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol

import torch

Piece = tuple[Sequence[int], range]
"""Block ids, at least one, and those KV heads of each that travel."""


class StagedBlocks(Protocol):
    """Which blocks of a view make up a staged buffer. Made by `staged_blocks`."""

    counts: list[int]
    """Elements of the buffer, by peer."""

    def pack(self, view: torch.Tensor, staged: torch.Tensor) -> None:
        """Copy from the blocks of `view` to the whole buffer, a flat tensor of `view`'s dtype."""
        ...

    def unpack(self, parts: Sequence[torch.Tensor], view: torch.Tensor) -> None:
        """Copy from the peers' parts, flat tensors in their order, to the blocks of `view`."""
        ...


def staged_blocks(by_peer: Sequence[Sequence[Piece]], view: torch.Tensor) -> StagedBlocks:
    """Prepare to pack or unpack any number of layers.

    Args:
        by_peer: the pieces that go to, or come from, each peer. Those to be unpacked name no block
            and head twice.
        view: that of one layer, [blocks, heads, tokens, content] with content in one piece, as
            8-byte elements. All layers' views must have the same shape and strides.

    On CUDA nothing here or in the copies waits for the device. Tables are made and copies run on
    the current stream. There, the parts to be unpacked have to be consecutive in one buffer.
    """
    return (TableBlocks if view.is_cuda else IndexedBlocks)(by_peer, view)


class TableBlocks:
    """By a Triton kernel, from a table of where each (block, head) starts in the view."""

    def __init__(self, by_peer: Sequence[Sequence[Piece]], view: torch.Tensor) -> None:
        from pat_vllm.kernels.device import TILE

        if view.stride(3) != 1 or view.element_size() != 8:
            raise ValueError(f"content must be 8-byte words in one piece, got {view.dtype}")
        block_stride, head_stride, token_stride, _ = view.stride()
        tokens, content = view.shape[2:]
        self._run = tokens * content
        if token_stride == content:
            # A (block, head) is one range: cut as suits the kernel, not by tokens.
            self._width = gcd(self._run, TILE)
            self._stride = self._width
        else:
            self._width, self._stride = content, token_stride
        strides = (block_stride, head_stride, self._stride, self._width)
        self._align = 2 if all(stride % 2 == 0 for stride in strides) else 1

        pieces = [piece for peer in by_peer for piece in peer]
        sizes = [[len(blocks) * len(heads) for blocks, heads in peer] for peer in by_peer]
        self.counts = [sum(peer) * self._run for peer in sizes]
        self._num_runs = sum(map(sum, sizes))
        ids = torch.tensor([b for blocks, _ in pieces for b in blocks], dtype=torch.int64)
        if view.is_cuda and len(ids):
            ids = ids.pin_memory().to(view.device, non_blocking=True)
        starts = ids.mul_(block_stride).split([len(blocks) for blocks, _ in pieces])
        heads_of = [
            torch.arange(heads.start, heads.stop, device=view.device).mul_(head_stride)
            for _, heads in pieces
        ]
        self._table = torch.empty(self._num_runs, dtype=torch.int64, device=view.device)
        parts = self._table.split([size for peer in sizes for size in peer])
        for start, heads, part in zip(starts, heads_of, parts, strict=True):
            torch.add(start[:, None], heads, out=part.view(len(start), len(heads)))

    def pack(self, view: torch.Tensor, staged: torch.Tensor) -> None:
        assert len(staged) == sum(self.counts)
        self._launch(view, staged, pack=True)

    def unpack(self, parts: Sequence[torch.Tensor], view: torch.Tensor) -> None:
        assert [len(part) for part in parts] == self.counts
        first, start = parts[0], parts[0].storage_offset()
        for part in parts:
            assert part.storage_offset() == start, "parts must follow each other in one buffer"
            start += len(part)
        self._launch(view, first.as_strided((sum(self.counts),), (1,)), pack=False)

    def _launch(self, view: torch.Tensor, staged: torch.Tensor, pack: bool) -> None:
        from pat_vllm.kernels.device import TILE, WARPS, copy_runs_kernel

        if not self._num_runs:
            return
        segments = self._run // self._width
        padded = 1 << (self._width - 1).bit_length()
        rows = max(1, TILE // padded)
        num_rows = self._num_runs * segments
        copy_runs_kernel[(-(-num_rows // rows),)](
            view,
            staged,
            self._table,
            num_rows,
            SEGMENTS=segments,
            STRIDE=self._stride,
            WIDTH=self._width,
            PADDED=padded,
            ROWS=rows,
            ALIGN=self._align,
            PACK=pack,
            num_warps=WARPS,
        )


_LONG_RUN_BYTES = 32 << 10
"""Consecutive blocks of this size, on average, are written faster one run after the other."""


@dataclass(frozen=True)
class _IndexedPiece:
    """One piece: which part of a view, and where in its peer's part of the buffer.

    Attributes:
        blocks: an int64 tensor, or a slice where block ids are consecutive.
        runs: the same as (first block, blocks) of consecutive ones, where they are long.
        shape: [blocks, heads, tokens, content].
    """

    blocks: torch.Tensor | slice
    runs: list[tuple[int, int]] | None
    heads: range
    start: int
    shape: tuple[int, int, int, int]

    @property
    def end(self) -> int:
        blocks, heads, tokens, content = self.shape
        return self.start + blocks * heads * tokens * content

    def pack(self, view: torch.Tensor, part: torch.Tensor) -> None:
        heads, staged = self._heads(view), self._staged(part)
        if isinstance(self.blocks, slice):
            staged.copy_(heads[self.blocks])
        else:
            torch.index_select(heads, 0, self.blocks, out=staged)

    def unpack(self, part: torch.Tensor, view: torch.Tensor) -> None:
        heads, staged = self._heads(view), self._staged(part)
        if self.runs is None:
            heads.index_copy_(0, self.blocks, staged)
            return
        done = 0
        for first, count in self.runs:
            heads[first : first + count].copy_(staged[done : done + count])
            done += count

    def _heads(self, view: torch.Tensor) -> torch.Tensor:
        return view.narrow(1, self.heads.start, len(self.heads))

    def _staged(self, part: torch.Tensor) -> torch.Tensor:
        return part[self.start : self.end].view(self.shape)


class IndexedBlocks:
    """By torch's indexing, piece by piece."""

    def __init__(self, by_peer: Sequence[Sequence[Piece]], view: torch.Tensor) -> None:
        tokens, content = view.shape[2:]
        self._by_peer: list[list[_IndexedPiece]] = []
        for peer in by_peer:
            pieces: list[_IndexedPiece] = []
            for blocks, heads in peer:
                start = pieces[-1].end if pieces else 0
                shape = len(blocks), len(heads), tokens, content
                runs = _runs(blocks)
                long = len(blocks) * len(heads) * tokens * content * view.element_size() >= (
                    _LONG_RUN_BYTES * len(runs)
                )
                pieces.append(
                    _IndexedPiece(
                        _index(blocks, runs, view.device),
                        runs if long or len(runs) == 1 else None,
                        heads,
                        start,
                        shape,
                    )
                )
            self._by_peer.append(pieces)
        self.counts = [pieces[-1].end if pieces else 0 for pieces in self._by_peer]

    def pack(self, view: torch.Tensor, staged: torch.Tensor) -> None:
        for pieces, part in zip(self._by_peer, staged.split(self.counts), strict=True):
            for piece in pieces:
                piece.pack(view, part)

    def unpack(self, parts: Sequence[torch.Tensor], view: torch.Tensor) -> None:
        for pieces, part in zip(self._by_peer, parts, strict=True):
            for piece in pieces:
                piece.unpack(part, view)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first block, blocks) of consecutive ids."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((block, 1))
    return runs


def _index(
    blocks: Sequence[int], runs: Sequence[tuple[int, int]], device: torch.device
) -> torch.Tensor | slice:
    """`blocks` as an index. A fresh pool gives consecutive ones, which copy without a lookup."""
    if len(runs) == 1:
        first, count = runs[0]
        return slice(first, first + count)
    return torch.tensor(blocks, dtype=torch.int64, device=device)

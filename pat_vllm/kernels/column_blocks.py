"""Columns of a matrix come together in one block of its memory, and go back.

Columns lie scattered over a matrix, a part of each row. Some kernels need them without gaps. To
that end a matrix of `[rows, columns]` is cut into as many bands of rows as of columns, so that band
`i` of the rows has as many elements as band `i` of the columns, which moves there. What lay there
goes where these came from: the piece of band `i` of the rows in band `j` of the columns, and the
piece of band `j` of the rows in band `i` of the columns, are of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def bands_of(columns: int, part: int) -> int:
    """Into how many bands a matrix is cut so that `part` of its columns can be some of them.

    A `ColumnBlock` needs rows that can be cut into as many.
    """
    return columns // math.gcd(columns, part)


class ColumnBlock:
    """A range of a matrix's columns, of one band or several neighbouring ones.

    Args:
        matrix: `[rows, columns]` without gaps, of any dtype.
        start: the first column, with which a band begins.
        size: how many columns.

    Attributes:
        block: `[rows, size]`, the view without gaps in which the columns lie when they are
            together.
        num_bytes: what `gather` and `scatter` read, each, and write.

    Raises:
        ValueError: rows or columns cannot be cut so.
    """

    def __init__(self, matrix: torch.Tensor, start: int, size: int) -> None:
        rows, columns = matrix.shape
        bands = bands_of(columns, size)
        width = columns // bands
        if rows % bands or start % width or not matrix.is_contiguous():
            raise ValueError(
                f"a matrix of {rows} x {columns} cannot be cut into {bands} bands of rows and of "
                f"columns, for {size} columns from {start} on"
            )
        first, end = start // width, (start + size) // width
        self.block = matrix.view(bands, rows * width)[first:end].view(rows, size)
        words = matrix.view(_widest(width * matrix.itemsize))
        pieces = words.view(bands, rows // bands, bands, -1)
        self._words = self.block.view(words.dtype)
        self._apart = pieces[:, :, first:end]
        self._displaced = [
            (pieces[other, :, first:end], pieces[first:end, :, other].transpose(0, 1))
            for other in range(bands)
            if not first <= other < end
        ]
        self.num_bytes = self.block.nbytes * 2 + sum(a.nbytes for a, _ in self._displaced)

    def gather(self, staging: torch.Tensor) -> None:
        """Bring the columns together.

        Args:
            staging: bytes, at least as many as `block` has.
        """
        kept = self._kept(staging)
        kept.copy_(self._apart)
        for place, displaced in self._displaced:
            place.copy_(displaced)
        self._words.copy_(kept.view(self._words.shape))

    def scatter(self, staging: torch.Tensor) -> None:
        """Undo `gather`."""
        kept = self._kept(staging)
        kept.view(self._words.shape).copy_(self._words)
        for place, displaced in self._displaced:
            displaced.copy_(place)
        self._apart.copy_(kept)

    def _kept(self, staging: torch.Tensor) -> torch.Tensor:
        return staging[: self.block.nbytes].view(self._words.dtype).view(self._apart.shape)


def _widest(num_bytes: int) -> torch.dtype:
    """What so many bytes are copied as: bytes one by one take longer."""
    wide = (torch.int64, torch.int32, torch.int16)
    return next((dtype for dtype in wide if num_bytes % dtype.itemsize == 0), torch.uint8)


@torch.inference_mode()
def gather(blocks: Sequence[ColumnBlock]) -> int:
    """Bring the columns of each block together, on the current stream; returns bytes moved."""
    staging = _staging(blocks)
    for block in blocks:
        block.gather(staging)
    return sum(block.num_bytes for block in blocks)


@torch.inference_mode()
def scatter(blocks: Sequence[ColumnBlock]) -> int:
    """Undo `gather`; returns bytes moved."""
    staging = _staging(blocks)
    for block in blocks:
        block.scatter(staging)
    return sum(block.num_bytes for block in blocks)


def _staging(blocks: Sequence[ColumnBlock]) -> torch.Tensor:
    most = max((block.block for block in blocks), key=lambda block: block.nbytes)
    return torch.empty(most.nbytes, dtype=torch.uint8, device=most.device)

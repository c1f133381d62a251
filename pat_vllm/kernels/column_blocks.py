"""Columns of a matrix come together in one block of its memory, and go back.

Columns lie scattered over a matrix, a part of each row. Some kernels need them without gaps. To
that end a matrix of `[rows, columns]` is cut into as many bands of rows as of columns, so that band
`i` of the rows has as many elements as band `i` of the columns, which moves there. What lay there
goes where these came from: the piece of band `i` of the rows in band `j` of the columns, and the
piece of band `j` of the rows in band `i` of the columns, are of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ColumnBlock:
    """A band of a matrix's columns.

    Args:
        matrix: `[rows, columns]` without gaps, of any dtype.
        bands: into how many bands the columns are cut.
        band: which one this is.

    Attributes:
        block: `[rows, columns / bands]`, the view without gaps in which the columns lie when they
            are together.
        num_bytes: what `gather` and `scatter` read, each, and write.

    Raises:
        ValueError: rows or columns cannot be cut into so many bands.
    """

    def __init__(self, matrix: torch.Tensor, bands: int, band: int) -> None:
        rows, columns = matrix.shape
        if rows % bands or columns % bands or not matrix.is_contiguous():
            raise ValueError(
                f"a matrix of {rows} x {columns} cannot be cut into {bands} bands of rows and of "
                "columns"
            )
        width = columns // bands
        pieces = matrix.view(bands, rows // bands, bands, width)
        self.block = matrix.view(bands, rows, width)[band]
        self._together = pieces[band].view(rows, width)
        self._apart = pieces[:, :, band]
        self._displaced = [
            (pieces[other, :, band], pieces[band, :, other])
            for other in range(bands)
            if other != band
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
        self._together.copy_(kept.view(self._together.shape))

    def scatter(self, staging: torch.Tensor) -> None:
        """Undo `gather`."""
        kept = self._kept(staging)
        kept.view(self._together.shape).copy_(self._together)
        for place, displaced in self._displaced:
            displaced.copy_(place)
        self._apart.copy_(kept)

    def _kept(self, staging: torch.Tensor) -> torch.Tensor:
        return staging[: self.block.nbytes].view(self.block.dtype).view(self._apart.shape)


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

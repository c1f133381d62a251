"""How a shard's rows are brought together inside the storage of a whole weight. Pure.

The storage of a fused matrix holds q, k and v (or gate and up) end to end, so the shard of another
layout is scattered over it. A layout needs its shard in consecutive rows, which always begin at the
same row, as compiled code and CUDA graphs keep the address. For that, a few rows trade places: one
part of the shard usually stays where it is, the others come to it, and what lay there goes where
they came from. The base layout's shard is the whole storage. Its block is all rows in their
original order, so that it is reached like any other layout's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pat_vllm.weights.shards import Piece


@dataclass(frozen=True)
class Swap:
    """Rows `a` to `a + length` trade places with rows `b` to `b + length`; the two are disjoint."""

    a: int
    b: int
    length: int


@dataclass(frozen=True)
class Block:
    """Where a layout finds its shard: consecutive rows from row `start` on.

    Attributes:
        units: the shard's units in the shard's order, each by its place in the original storage.
        unit: number of rows of a unit, which always move together.
    """

    start: int
    units: tuple[int, ...]
    unit: int

    @property
    def size(self) -> int:
        """Rows of the shard."""
        return len(self.units) * self.unit


@dataclass(frozen=True)
class RowOrder:
    """What lies where in a storage: `units[i]` is the original unit that lies in place `i`. A unit
    has `unit` rows."""

    units: tuple[int, ...]
    unit: int

    @classmethod
    def original(cls, rows: int, unit: int) -> RowOrder:
        """The order in which the weight was loaded."""
        return cls(tuple(range(rows // unit)), unit)

    def bring(self, block: Block) -> RowOrder:
        """The order, a few swaps from this one, in which the rows of `block` are in its place."""
        assert block.unit == self.unit
        first = block.start // self.unit
        after = list(self.units)
        _swap_until(after, dict(enumerate(block.units, start=first)))
        return RowOrder(tuple(after), self.unit)

    def swaps_to(self, other: RowOrder) -> list[Swap]:
        """The swaps, one after the other, that lead from this order to another of the same rows."""
        assert other.unit == self.unit
        return _joined(_swap_until(list(self.units), dict(enumerate(other.units))), self.unit)


def common_unit(rows: int, shards: Iterable[Sequence[Piece]]) -> int:
    """The most rows of a unit: every part of every shard begins and ends at a multiple of it.

    Args:
        rows: number of rows of the storage.
        shards: the pieces of each shard, as `block_of` takes them.
    """
    ends = (n for pieces in shards for piece in pieces for n in (piece.src, piece.length))
    return math.gcd(rows, *ends)


def block_of(pieces: Sequence[Piece], rows: int, unit: int, banded: bool = False) -> Block:
    """The block for a shard, placed where the fewest rows have to move from the original order.

    Args:
        pieces: from which rows of the storage (`src`) to which of the shard (`dst`) to copy.
        rows: number of rows of the storage.
        banded: the block begins with a band of those that its size divides the storage into: at a
            multiple of the greatest common divisor of both (see `ColumnBlock`).
    """
    units = tuple(
        row // unit
        for piece in sorted(pieces, key=lambda piece: piece.dst)
        for row in range(piece.src, piece.src + piece.length, unit)
    )
    original = RowOrder.original(rows, unit)
    last = rows - len(units) * unit
    if banded:
        starts = set(range(0, last + 1, math.gcd(rows, len(units) * unit)))
    else:
        # One of the parts stays where it is, unless the block would then reach out of the storage.
        starts = {min(max(piece.src - piece.dst, 0), last) for piece in pieces}
    blocks = (Block(start, units, unit) for start in sorted(starts))
    return min(blocks, key=lambda block: rows_moved(original.swaps_to(original.bring(block))))


def rows_moved(swaps: Iterable[Swap]) -> int:
    """Number of rows that swaps read, and write: both sides of each."""
    return sum(2 * swap.length for swap in swaps)


def rounds(swaps: Iterable[Swap]) -> list[list[Swap]]:
    """Cut a sequence of swaps into rounds, each of different rows, so that it can run at once."""
    disjoint: list[list[Swap]] = []
    for swap in swaps:
        if not disjoint or any(_overlap(swap, other) for other in disjoint[-1]):
            disjoint.append([])
        disjoint[-1].append(swap)
    return disjoint


def _overlap(swap: Swap, other: Swap) -> bool:
    """Whether either side of one swap shares a row with either side of the other."""
    return any(
        x < y + other.length and y < x + swap.length
        for x in (swap.a, swap.b)
        for y in (other.a, other.b)
    )


def _swap_until(units: list[int], wanted: Mapping[int, int]) -> list[tuple[int, int]]:
    """Swap places in `units` until `wanted[place]` lies there; returns the pairs of places."""
    place_of = {unit: place for place, unit in enumerate(units)}
    pairs = []
    for place, unit in wanted.items():
        came_from, displaced = place_of[unit], units[place]
        if came_from != place:
            units[place], units[came_from] = unit, displaced
            place_of[unit], place_of[displaced] = place, came_from
            pairs.append((place, came_from))
    return pairs


def _joined(pairs: Sequence[tuple[int, int]], unit: int) -> list[Swap]:
    """Swaps of rows from pairs of places of units. Neighbouring pairs that follow each other become
    one swap, as long as its two sides stay disjoint."""
    swaps: list[Swap] = []
    for a, b in pairs:
        last = swaps[-1] if swaps else None
        if (
            last is not None
            and (a * unit, b * unit) == (last.a + last.length, last.b + last.length)
            and last.length < abs(last.a - last.b)
        ):
            swaps[-1] = Swap(last.a, last.b, last.length + unit)
        else:
            swaps.append(Swap(a * unit, b * unit, unit))
    return swaps

"""Which rows of a full weight make up one rank's shard. Pure: imports neither torch nor vLLM.

"Full" is the tensor as the checkpoint holds it, with fused matrices (q, k, v; gate, up) laid end
to end; "rows" are indices along the dimension that tensor parallelism cuts. The arithmetic is
that of vLLM's layers (`model_executor/layers/linear.py` and `vocab_parallel_embedding.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from pat_vllm.layout import Experts, Place


@dataclass(frozen=True)
class Piece:
    """`length` consecutive rows: from row `src` of one tensor to row `dst` of another."""

    src: int
    dst: int
    length: int


@dataclass(frozen=True)
class Shard:
    """One rank's part: `size` rows, filled by `pieces` of the full tensor, zero elsewhere."""

    size: int
    pieces: tuple[Piece, ...]

    def in_units(self, unit: int) -> Shard:
        """The same part, counted in groups of `unit` rows.

        Raises:
            ValueError: a group is divided.
        """
        if unit == 1:
            return self
        what = f"rows or columns of a shard by blocks of {unit}"
        return Shard(
            _divide(what, self.size, unit),
            tuple(
                Piece(*(_divide(what, n, unit) for n in (piece.src, piece.dst, piece.length)))
                for piece in self.pieces
            ),
        )

    def times(self, length: int) -> Shard:
        """The same part, of a tensor with `length` rows for each of these."""
        return Shard(
            self.size * length,
            tuple(
                Piece(piece.src * length, piece.dst * length, piece.length * length)
                for piece in self.pieces
            ),
        )


class Partition(ABC):
    """How one dimension of a layer's weight is cut. Those of a layer are equal in all layouts."""

    dim: int
    """Dimension of the weight that is cut."""
    nested: ClassVar[bool] = True
    """Whether a rank's shard consists of rows of its shard in a layout with a smaller tp."""

    @abstractmethod
    def shard(self, tp: int, tp_rank: int) -> Shard:
        """The shard of rank `tp_rank` of `tp`.

        Raises:
            ValueError: the layer cannot be cut `tp` ways.
        """

    def padded(self) -> Partition:
        """The same cut, with padding as rows of the full tensor."""
        return self


@dataclass(frozen=True)
class EvenPartition(Partition):
    """Fused matrices of `sizes` rows, each cut into `tp` equal parts.

    One size for a column-parallel (`dim` 0) or row-parallel (`dim` 1) layer; several for a merged
    column-parallel one. Weights of fused experts have a first dimension that counts experts, so
    that `dim` is one higher.
    """

    sizes: tuple[int, ...]
    dim: int = 0

    def shard(self, tp: int, tp_rank: int) -> Shard:
        start, pieces = 0, []
        for size in self.sizes:
            rows = _divide("rows of a matrix by tp", size, tp)
            pieces.append((start + tp_rank * rows, rows))
            start += size
        return _shard(pieces)


@dataclass(frozen=True)
class QKVPartition(Partition):
    """Fused q, k and v, cut by heads.

    With at least as many ranks as KV heads, every rank has one KV head and
    `tp / total_kv_heads` consecutive ranks have the same one.
    """

    total_heads: int
    total_kv_heads: int
    head_size: int
    v_head_size: int
    dim: int = 0

    def shard(self, tp: int, tp_rank: int) -> Shard:
        heads = _divide("attention heads by tp", self.total_heads, tp)
        if tp >= self.total_kv_heads:
            kv_heads = 1
            copies = _divide("tp by KV heads", tp, self.total_kv_heads)
        else:
            kv_heads = _divide("KV heads by tp", self.total_kv_heads, tp)
            copies = 1
        first_kv_head = tp_rank // copies * kv_heads

        k_start = self.total_heads * self.head_size
        v_start = k_start + self.total_kv_heads * self.head_size
        return _shard(
            [
                (tp_rank * heads * self.head_size, heads * self.head_size),
                (k_start + first_kv_head * self.head_size, kv_heads * self.head_size),
                (v_start + first_kv_head * self.v_head_size, kv_heads * self.v_head_size),
            ]
        )


@dataclass(frozen=True)
class VocabPartition(Partition):
    """`vocab_size` rows, padded to a multiple of `padding_size`, then cut into equal ranges.

    The padding is zero and lies at the end of the last shards: a shard may be nothing but padding.
    """

    vocab_size: int
    padding_size: int
    dim: int = 0

    def shard(self, tp: int, tp_rank: int) -> Shard:
        rows = _divide("padded vocabulary rows by tp", self._padded_size, tp)
        start = min(tp_rank * rows, self.vocab_size)
        stop = min((tp_rank + 1) * rows, self.vocab_size)
        return _shard([(start, stop - start)], size=rows)

    def padded(self) -> Partition:
        """Even ranges of all rows."""
        return EvenPartition((self._padded_size,))

    @property
    def _padded_size(self) -> int:
        return -(-self.vocab_size // self.padding_size) * self.padding_size


@dataclass(frozen=True)
class ExpertPartition(Partition):
    """A range of whole experts for each rank, as vLLM's `determine_expert_map` places them.

    If `tp` does not divide the experts, the first ranks have one more. Then a rank's range need not
    lie within its range in a layout with a smaller tp, other than tp=1; `models/moe_config.py`
    refuses such a base layout.
    """

    num_experts: int
    dim: int = 0

    def shard(self, tp: int, tp_rank: int) -> Shard:
        if self.num_experts < tp:
            raise ValueError(f"{self.num_experts} experts cannot be spread over tp={tp}")
        each, more = divmod(self.num_experts, tp)
        return _shard([(tp_rank * each + min(tp_rank, more), each + (tp_rank < more))])


@dataclass(frozen=True)
class TiledPartition(Partition):
    """A tensor that has a matrix in tiles, whose rows or columns are cut as `matrix` says.

    Attributes:
        dim: dimension of the tensor that counts tiles in the direction of that cut.
        unit: rows, or columns, of a tile.
        length: elements along `dim` for each tile.
    """

    matrix: Partition
    dim: int
    unit: int
    length: int

    def shard(self, tp: int, tp_rank: int) -> Shard:
        return self.matrix.shard(tp, tp_rank).in_units(self.unit).times(self.length)


@dataclass(frozen=True)
class FirstPartition(Partition):
    """`size` rows on the first rank, zeros on the others, as for a bias that an all-reduce adds."""

    size: int
    dim: int = 0
    nested = False

    def shard(self, tp: int, tp_rank: int) -> Shard:
        return _shard([(0, 0 if tp_rank else self.size)], size=self.size)


@dataclass(frozen=True)
class Cut:
    """How one dimension of a weight is cut, and whether it is.

    Attributes:
        experts: the cut is made only where experts lie so (`Place.experts`); None: everywhere.
    """

    partition: Partition
    experts: Experts | None = None

    @property
    def dim(self) -> int:
        """Dimension of the weight that is cut."""
        return self.partition.dim

    def ways(self, place: Place) -> int:
        """Into how many parts the dimension is cut, for a rank in that place; 1: it is whole."""
        return place.tp if self.experts in (None, place.experts) else 1

    def nested(self, place: Place) -> bool:
        """Whether that rank's shard consists of rows of its shard in a layout with a smaller tp."""
        return self.partition.nested or self.ways(place) == 1

    def shard(self, place: Place) -> Shard:
        """The shard of the rank in that place.

        Raises:
            ValueError: the layer cannot be cut so.
        """
        ways = self.ways(place)
        return self.partition.shard(ways, place.tp_rank if ways > 1 else 0)

    def padded(self) -> Cut:
        """The same cut, with padding as rows of the full tensor."""
        return replace(self, partition=self.partition.padded())


def pieces_of(target: Shard, base: Shard) -> tuple[Piece, ...]:
    """Copies that build `target` from `base`, a shard of the same tensor that contains it.

    Together with zeros where `target` has no piece, the copies fill it completely.
    """
    copies = []
    for piece in target.pieces:
        done = 0
        while done < piece.length:
            row = piece.src + done
            source = next((p for p in base.pieces if p.src <= row < p.src + p.length), None)
            assert source is not None, f"the base shard lacks row {row}"
            skip = row - source.src
            length = min(piece.length - done, source.length - skip)
            copies.append(Piece(source.dst + skip, piece.dst + done, length))
            done += length
    return tuple(copies)


def _shard(pieces: Iterable[tuple[int, int]], size: int | None = None) -> Shard:
    """A shard of (start, length) ranges of the full tensor, one after the other."""
    dst, laid = 0, []
    for start, length in pieces:
        if length:
            laid.append(Piece(src=start, dst=dst, length=length))
        dst += length
    return Shard(size=dst if size is None else size, pieces=tuple(laid))


def _divide(what: str, number: int, by: int) -> int:
    if number % by:
        raise ValueError(f"{what}: {number} is not a multiple of {by}")
    return number // by

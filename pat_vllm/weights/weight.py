"""A weight of a vLLM model on one rank, and how another layout's is copied out of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, TypeAlias

import torch
from torch import nn

from pat_vllm.layout import Place
from pat_vllm.weights.shards import Cut, Shard, pieces_of

WHOLE = Place(tp=1, tp_rank=0)
"""The place of a weight that nothing cuts."""

Share: TypeAlias = Literal["view", "block", "copy"]
"""What a layout may have of a weight in the base layout's storage: a view in any strides; a block
without gaps, as kernels that ignore strides need; or nothing but a copy elsewhere."""


@dataclass(frozen=True, eq=False)
class Weight:
    """One parameter or persistent buffer of a model.

    Attributes:
        tensor: one rank's shard, or the whole weight if nothing cuts it. It shares its storage
            with the parameter, and keeps it when vLLM gives the parameter other data.
        cuts: at most one for each dimension; none for a weight that is whole on every rank.
        place: the rank's place, by which `cuts` choose its shard.
        module, attribute: where the model has it.
        share: how layouts share it, where its shards are nested (`Cut.nested`).
        transposed: the model has `tensor.t()`.
        unit: rows, and as many columns, of the matrix that `cuts` are of for which an element of
            this stands; above 1 for scales of blocks.
    """

    name: str
    tensor: torch.Tensor
    cuts: tuple[Cut, ...]
    place: Place
    module: nn.Module
    attribute: str
    share: Share = "view"
    transposed: bool = False
    unit: int = 1

    @property
    def storage(self) -> int:
        """Identity of the memory; alike for tied weights."""
        return int(self.tensor.untyped_storage()._cdata)

    @property
    def current(self) -> torch.Tensor:
        """What the model has there now, as `tensor` has it."""
        data: torch.Tensor = getattr(self.module, self.attribute).data
        return data.t() if self.transposed else data

    @property
    def shared(self) -> bool:
        """Whether the layout in `place` can have it in the base layout's storage."""
        return self.share != "copy" and all(cut.nested(self.place) for cut in self.cuts)

    def bind(self, tensor: torch.Tensor) -> None:
        """Have the model use another tensor."""
        getattr(self.module, self.attribute).data = tensor.t() if self.transposed else tensor

    def shard(self, cut: Cut, unit: int | None = None) -> Shard:
        """This rank's part along the dimension of one of `cuts`, in elements of `tensor`.

        Args:
            unit: counted in these in place of `unit`.

        Raises:
            ValueError: the layer cannot be cut so.
        """
        try:
            return _shard(cut, self.place, self.tensor.dim(), unit or self.unit)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from error


@torch.no_grad()
def derive(weight: Weight, base: Weight) -> None:
    """Copy a weight's shard out of the base layout's, into the storage that it has."""
    shards = [weight.shard(cut) for cut in weight.cuts]
    if any(sum(piece.length for piece in shard.pieces) < shard.size for shard in shards):
        weight.tensor.zero_()
    copies = (
        pieces_of(shard, base.shard(cut, weight.unit))
        for cut, shard in zip(weight.cuts, shards, strict=True)
    )
    whole = in_units(base, weight.unit)
    for pieces in product(*copies):
        into, out_of = weight.tensor, whole
        for cut, piece in zip(weight.cuts, pieces, strict=True):
            into = into.narrow(cut.dim, piece.dst, piece.length)
            out_of = out_of.narrow(cut.dim, piece.src, piece.length)
        into.copy_(out_of)


def in_units(weight: Weight, unit: int) -> torch.Tensor:
    """A weight's tensor, with an element for each block of `unit` rows and columns.

    vLLM's experts have scales of smaller blocks where shards end inside the checkpoint's.

    Raises:
        ValueError: its blocks cannot be divided so.
    """
    if weight.unit % unit:
        raise ValueError(f"{weight.name}: blocks of {weight.unit} cannot become blocks of {unit}")
    tensor = weight.tensor
    if (ratio := weight.unit // unit) > 1:
        tensor = tensor.repeat_interleave(ratio, dim=-2).repeat_interleave(ratio, dim=-1)
    return tensor


def shape_in(base: Weight, place: Place, unit: int) -> list[int]:
    """The shape of a weight's tensor on a rank in another place.

    Args:
        base: the weight in the base layout.
        unit: of the tensor there, as `Weight.unit`.
    """
    shape = list(in_units(base, unit).shape)
    for cut in base.cuts:
        shape[cut.dim] = _shard(cut, place, len(shape), unit).size
    return shape


def _shard(cut: Cut, place: Place, dims: int, unit: int) -> Shard:
    """The part of a rank in that place, of a tensor with so many dimensions, the last two of which
    are a matrix's, in blocks of `unit` rows and columns."""
    return cut.shard(place).in_units(unit if cut.dim >= dims - 2 else 1)

"""A copy of the weights for each layout."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import product

import torch
from torch import nn

from pat_vllm.layout import Layout
from pat_vllm.weights.model_weights import Weight, matching_weights, model_weights
from pat_vllm.weights.shards import pieces_of


class MaterializedShards:
    """Every layout has its own copy of its weights, in its own storage.

    `capture` copies nothing, but keeps the base model's plain weights alive until `release`.
    """

    def __init__(self) -> None:
        self._base: dict[str, Weight] | None = None

    def check(self, model: nn.Module) -> None:
        """See `WeightStrategy`."""
        for _ in model_weights(model):
            pass

    def capture(self, model: nn.Module) -> None:
        """See `WeightStrategy`."""
        self._base = {weight.name: weight for weight in model_weights(model)}

    def building(self) -> AbstractContextManager[None]:
        """See `WeightStrategy`."""
        return nullcontext()

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Copy each weight's shard out of the base weights, into the storage it already has.

        Raises:
            ValueError: the model's weights are not those of the base model cut another way.
        """
        assert self._base is not None, "fill() before capture() or after release()"
        for weight, base in matching_weights(model, self._base):
            self._derive(weight, base)

    def release(self) -> None:
        """See `WeightStrategy`."""
        self._base = None

    def refresh(self, base: nn.Module, others: Iterable[nn.Module]) -> None:
        """See `WeightStrategy`."""
        self.capture(base)
        for model in others:
            self.fill(model)
        self.release()

    def arrange(self, layout: Layout) -> int:
        """See `WeightStrategy`."""
        return 0

    def _derive(self, weight: Weight, base: Weight) -> None:
        target, source = weight.tensor, base.tensor
        shards = [cut.shard(weight.place) for cut in weight.cuts]
        if any(sum(piece.length for piece in one.pieces) < one.size for one in shards):
            target.zero_()
        copies = (
            pieces_of(shard, cut.shard(base.place))
            for cut, shard in zip(weight.cuts, shards, strict=True)
        )
        for pieces in product(*copies):
            into, out_of = target, source
            for cut, piece in zip(weight.cuts, pieces, strict=True):
                into = into.narrow(cut.dim, piece.dst, piece.length)
                out_of = out_of.narrow(cut.dim, piece.src, piece.length)
            into.copy_(out_of)

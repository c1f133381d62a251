"""A copy of the weights for each layout, for backends that pack weights, such as CPU's."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from pat_vllm.weights.loaders import WeightStrategy
from pat_vllm.weights.model_weights import Weight, derive, matching_weights, model_weights


class MaterializedShards(WeightStrategy):
    """Every layout has its own copy of its weights, in its own storage.

    A switch moves no weights. `capture` copies nothing, but keeps the base model's plain weights
    alive until `release`.
    """

    def __init__(self) -> None:
        self._base: dict[str, Weight] | None = None

    def capture(self, model: nn.Module) -> None:
        self._base = {weight.name: weight for weight in model_weights(model)}

    def fill(self, model: nn.Module) -> None:
        """Copy each weight's shard out of the base weights, into the storage it already has."""
        assert self._base is not None, "fill() before capture() or after release()"
        for weight, base in matching_weights(model, self._base):
            derive(weight, base)

    def release(self) -> None:
        self._base = None

    def refresh(self, base: nn.Module, others: Iterable[nn.Module]) -> None:
        self.capture(base)
        for model in others:
            self.fill(model)
        self.release()

"""A copy of the weights for each layout, for backends that pack weights, such as CPU's."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from pat_vllm.weights.kv_scales import KVScales
from pat_vllm.weights.loaders import WeightStrategy
from pat_vllm.weights.model_weights import matching_weights, quantized_layers
from pat_vllm.weights.weight import Weight, derive


class MaterializedShards(WeightStrategy):
    """Every layout has its own copy of its weights, in its own storage.

    A switch moves no weights. `capture` copies nothing, but keeps the base model's plain weights
    alive until `release`.
    """

    def __init__(self) -> None:
        self._base: dict[str, Weight] | None = None

    def check(self, model: nn.Module) -> None:
        super().check(model)
        for layer in quantized_layers(model).values():
            if isinstance(layer, KVScales):
                continue
            raise ValueError(
                f"pat.weights is 'materialized', but {layer.path} has quantized weights, of which "
                "layouts share one copy: set pat.weights='inplace' or 'auto'"
            )

    def capture(self, model: nn.Module) -> None:
        self._base = {weight.name: weight for weight in self.kept_weights(model)}

    def keep(self, modules: Collection[nn.Module]) -> None:
        assert self._base is not None, "keep() before capture() or after release()"
        self._base = self._kept(self._base, modules)

    def fill(self, model: nn.Module) -> None:
        """Copy each weight's shard out of the base weights, into the storage it already has."""
        assert self._base is not None, "fill() before capture() or after release()"
        for weight, base in matching_weights(self.kept_weights(model), self._base):
            derive(weight, base)

    def release(self) -> None:
        self._base = None

    def refresh(self, base: nn.Module, others: Iterable[nn.Module]) -> None:
        self.capture(base)
        for model in others:
            self.fill(model)
        self.release()

"""What a drafter with weights takes: its weights, its KV and its passes. Pure.

A drafter is a small decoder. MTP modules and EAGLE heads join the embedding of a token with what
the target has computed, and share the target's embeddings and head, unless they have their own. A
draft model has all of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pat_vllm.models.layer_sizes import size_of
from pat_vllm.models.model_size import ModelSize


@dataclass(frozen=True)
class DrafterSize:
    """The sizes of a drafter, counted in elements.

    Attributes:
        model: its layers, as a decoder with its head.
        joins: weights by which it joins embeddings and hidden states, whole on each rank.
        joins_cut: those of them that are cut over the ranks of a group.
        own_embedding, own_head: whether it has its own; else they are the target's.
    """

    model: ModelSize
    joins: int = 0
    joins_cut: int = 0
    own_embedding: bool = False
    own_head: bool = False

    @classmethod
    def of(
        cls, method: str, target: ModelSize, config: Mapping[str, Any] | None = None
    ) -> DrafterSize:
        """Of one of `OF_WEIGHTS` in `drafters.py`.

        Args:
            config: contents of the drafter's `config.json`; not looked at for MTP, whose module is
                a layer of the target's.

        Raises:
            ValueError: a size is missing or none, or the drafter's class is not known.
        """
        if method == "mtp":
            experts = target.experts and replace(target.experts, layers=1)
            layer = replace(target, layers=1, experts=experts, linear=None, mlps=0, window_layers=0)
            joins = 2 * target.hidden**2
            if not target.mlps:
                return cls(layer, joins=joins)
            # Of a model whose layers have attention or an MLP, it has attention.
            return cls(replace(layer, intermediate=0), joins_cut=joins)
        if method == "draft_model":
            own = ModelSize.of(config or {}, target.dtype_bytes)
            return cls(own, own_embedding=True, own_head=not own.tied)
        # vLLM's class is named, whose layers are those of its model's type.
        fields = {name: value for name, value in (config or {}).items() if name != "architectures"}
        own = ModelSize.of(fields, target.dtype_bytes)
        if method == "eagle":
            return cls(replace(own, vocab=target.vocab), joins=2 * own.hidden**2)
        # EAGLE-3 joins the hidden states of three layers, and its layer reads two vectors.
        own = replace(own, vocab=size_of(fields, "draft_vocab_size") or target.vocab)
        rows = (own.heads + 2 * own.kv_heads) * own.head_dim
        joins = 3 * target.hidden * own.hidden
        return cls(own, joins=joins, joins_cut=rows * own.hidden, own_head=True)

    def joining(self, tp: int) -> float:
        """Weights on one rank by which it joins its inputs."""
        return self.joins + self.joins_cut / tp

    def weight_bytes(self, tp: int, spread: bool = False) -> int:
        """A rank's shard of what is not the target's; `spread` as in `ModelSize`."""
        layers = replace(self.model, vocab=0).resident_bytes(tp, spread)
        own = (self.own_embedding + self.own_head) * self.model.head_weights(tp)
        return int(layers + (self.joining(tp) + own) * self.model.dtype_bytes)


def with_kv_of(model: ModelSize, drafter: DrafterSize | None) -> ModelSize:
    """The model with its drafter's layers, whose KV is like its own: what KV is counted by."""
    return model if drafter is None else replace(model, layers=model.layers + drafter.model.layers)

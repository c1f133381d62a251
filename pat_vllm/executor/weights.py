"""Weights are read from disk once, for the base layout; the other layouts' are derived in memory.

vLLM's own model loaders do the work, through its `register_model_loader`. A runner whose load
configuration is `base_load_config(...)` loads as the user asked and hands its plain parameters to a
`WeightStrategy`; one whose load configuration is `derived_load_config(...)` builds its model and
has the strategy fill it. Both happen before vLLM's `process_weights_after_loading`, which may pack
the parameters for its kernels and free the plain ones (it does on CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.config.utils import replace
from vllm.model_executor.layers.conv import ConvLayerBase
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm, RMSNormGated
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from pat_vllm.executor.shards import (
    EvenPartition,
    Partition,
    QKVPartition,
    VocabPartition,
    regroup,
)

BASE_FORMAT = "pat-base"
DERIVED_FORMAT = "pat-derived"

# Gathers a tensor of every rank of the base layout's TP group along a dimension, in rank order.
AllGather = Callable[[torch.Tensor, int], torch.Tensor]

# From the most derived class to the least: the first match decides.
SHARDED_LAYERS = (
    QKVParallelLinear,
    MergedColumnParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    ParallelLMHead,
    VocabParallelEmbedding,
)
# Whole on every rank, in every layout.
REPLICATED_LAYERS = (
    ReplicatedLinear,
    RMSNorm,
    GemmaRMSNorm,
    RMSNormGated,
    LayerNorm,
    ConvLayerBase,
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
)


@dataclass(frozen=True, eq=False)
class Weight:
    """One parameter or persistent buffer of a model.

    `tensor` shares its storage with the parameter, and keeps it when vLLM gives the parameter
    other data. It is one rank's shard under `partition`, or whole if that is None.
    """

    name: str
    tensor: torch.Tensor
    partition: Partition | None
    tp: int
    tp_rank: int


def model_weights(model: nn.Module) -> Iterator[Weight]:
    """Every weight of a vLLM model, in module order, tied ones once for each module.

    Raises:
        ValueError: a module's weights cannot be derived for another layout.
    """
    for path, module in model.named_modules():
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        layer = _layer_class(path, module) if parameters else None
        for name, parameter in parameters.items():
            full_name = f"{path}.{name}".lstrip(".")
            if layer is None:
                yield Weight(full_name, parameter.data, None, 1, 0)
            else:
                partition = _partition(full_name, module, layer, name, parameter)
                tp, tp_rank = (module.tp_size, module.tp_rank) if partition else (1, 0)
                yield Weight(full_name, parameter.data, partition, tp, tp_rank)
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield Weight(f"{path}.{name}".lstrip("."), buffer.data, None, 1, 0)


def _layer_class(path: str, module: nn.Module) -> type[nn.Module] | None:
    """The class of `SHARDED_LAYERS` that `module` is loaded as; None for a replicated one."""
    unquantized = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    if isinstance(module, LinearBase | VocabParallelEmbedding) and not isinstance(
        module.quant_method, unquantized
    ):
        raise ValueError(
            f"{path} ({type(module).__name__}) is quantized with "
            f"{type(module.quant_method).__name__}: PAT derives only unquantized weights. "
            "Use an unquantized checkpoint, or a static tensor_parallel_size without PAT."
        )
    for layer in SHARDED_LAYERS:
        if isinstance(module, layer):
            # A subclass with a loader of its own lays its rows out in a way of its own.
            if _weight_loaders(type(module)) == _weight_loaders(layer):
                return layer
            break
    else:
        if isinstance(module, REPLICATED_LAYERS):
            return None
    known = ", ".join(cls.__name__ for cls in SHARDED_LAYERS + REPLICATED_LAYERS)
    raise ValueError(
        f"PAT does not know how tensor parallelism cuts the weights of {path or 'the model'} "
        f"({type(module).__name__}). It knows {known}. "
        "Use a static tensor_parallel_size without PAT for this model."
    )


def _weight_loaders(cls: type) -> list[Callable[..., None]]:
    return [getattr(cls, n) for n in ("weight_loader", "weight_loader_v2") if hasattr(cls, n)]


def _partition(
    full_name: str,
    module: nn.Module,
    layer: type[nn.Module],
    name: str,
    parameter: nn.Parameter,
) -> Partition | None:
    loader = getattr(parameter, "weight_loader", None)
    if name not in ("weight", "bias") or getattr(loader, "__func__", None) not in _weight_loaders(
        layer
    ):
        raise ValueError(
            f"{full_name} ({layer.__name__}) does not have its layer's own weight loader: either "
            "this model loads it in a way of its own, and cannot be used with PAT, or vLLM has "
            "packed it for its kernels, and its plain values are gone."
        )
    if layer is RowParallelLinear:
        return EvenPartition((module.input_size,), dim=1) if name == "weight" else None
    if layer is QKVParallelLinear:
        return QKVPartition(
            module.total_num_heads,
            module.total_num_kv_heads,
            module.head_size,
            module.v_head_size,
        )
    if layer is MergedColumnParallelLinear:
        return EvenPartition(tuple(module.output_sizes))
    if layer is ColumnParallelLinear:
        return EvenPartition((module.output_size,))
    if module.num_added_embeddings:
        raise ValueError(
            f"{full_name} has {module.num_added_embeddings} embeddings added to the model's own: "
            "PAT does not derive those. Use a static tensor_parallel_size without PAT."
        )
    return VocabPartition(module.org_vocab_size, module.padding_size)


class WeightStrategy(Protocol):
    """Where the weights of the layouts other than the base layout come from.

    Within a base TP group every rank must make the same calls in the same order: `fill` may
    communicate.
    """

    def check(self, model: nn.Module) -> None:
        """Raise ValueError if the weights of `model` cannot be derived. Reads no values."""
        ...

    def capture(self, model: nn.Module) -> None:
        """Take the loaded, not yet processed weights of the base layout's model."""
        ...

    def fill(self, model: nn.Module) -> None:
        """Give the model of another layout its weights."""
        ...

    def release(self) -> None:
        """Forget the captured weights: all layouts are filled."""
        ...


class MaterializedShards:
    """Every layout has its own copy of its weights, in its own storage.

    `capture` copies nothing, but keeps the base model's plain weights alive until `release`.
    After the weights of the base model have changed in place, capture, fill and release again.

    Args:
        all_gather: gathers over the base layout's TP group, such as its `GroupCoordinator`'s
            `all_gather`. Needed if the base layout's tp is more than 1; then `fill` gathers one
            parameter at a time.
    """

    def __init__(self, all_gather: AllGather | None = None) -> None:
        self._all_gather = all_gather
        self._base: dict[str, Weight] | None = None

    def check(self, model: nn.Module) -> None:
        for _ in model_weights(model):
            pass

    def capture(self, model: nn.Module) -> None:
        self._base = {weight.name: weight for weight in model_weights(model)}

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Copy each weight's shard out of the base weights, into the storage it already has.

        Raises:
            ValueError: the model's weights are not those of the base model cut another way.
        """
        assert self._base is not None, "fill() before capture() or after release()"
        derived = {weight.name: weight for weight in model_weights(model)}
        if unmatched := derived.keys() ^ self._base.keys():
            raise ValueError(
                f"{min(unmatched)} exists in only one of the base layout's model and another's: "
                "this model cannot be used with PAT"
            )
        sources: dict[int, int] = {}
        for name, weight in derived.items():
            base = self._base[name]
            # The two may be tied in this layout only if they are in the base layout.
            source = sources.setdefault(weight.tensor.data_ptr(), base.tensor.data_ptr())
            if source != base.tensor.data_ptr() and weight.tensor.numel():
                raise ValueError(f"{name} shares its storage here, but not in the base layout")
            self._derive(weight, base)

    def release(self) -> None:
        self._base = None

    def _derive(self, weight: Weight, base: Weight) -> None:
        name, target, source = weight.name, weight.tensor, base.tensor
        if weight.partition != base.partition or target.dtype != source.dtype:
            raise ValueError(
                f"{name} differs between layouts by more than how it is cut: "
                f"{base.partition}, {source.dtype} for tp={base.tp} and "
                f"{weight.partition}, {target.dtype} for tp={weight.tp}"
            )
        if weight.partition is None:
            _check_shape(name, target, tuple(source.shape))
            target.copy_(source)
            return

        dim = weight.partition.dim
        shard = weight.partition.shard(weight.tp, weight.tp_rank)
        shards = [weight.partition.shard(base.tp, rank) for rank in range(base.tp)]
        _check_shape(name, target, _resized(source, dim, shard.size))
        _check_shape(name, source, _resized(source, dim, shards[0].size))
        if base.tp > 1:
            assert self._all_gather is not None, "a base layout with tp > 1 needs an all_gather"
            source = self._all_gather(source, dim)
            _check_shape(name, source, _resized(source, dim, base.tp * shards[0].size))
        if sum(piece.length for piece in shard.pieces) < shard.size:
            target.zero_()
        for piece in regroup(shard, shards):
            rows = source.narrow(dim, piece.src, piece.length)
            target.narrow(dim, piece.dst, piece.length).copy_(rows)


def _resized(tensor: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} where its layer implies {shape}: this model "
            "cuts it in a way of its own, and cannot be used with PAT"
        )


def base_load_config(user: LoadConfig, strategy: WeightStrategy) -> LoadConfig:
    """Load configuration of the base layout: as `user` says, then `strategy.capture`."""
    return _load_config(BASE_FORMAT, user, strategy)


def derived_load_config(user: LoadConfig, strategy: WeightStrategy) -> LoadConfig:
    """Load configuration of any other layout: `strategy.fill`, nothing from disk."""
    return _load_config(DERIVED_FORMAT, user, strategy)


def _load_config(load_format: str, user: LoadConfig, strategy: WeightStrategy) -> LoadConfig:
    extra = {"strategy": strategy, "user": user}
    return replace(user, load_format=load_format, model_loader_extra_config=extra)


@register_model_loader(BASE_FORMAT)
class BaseLayoutLoader(BaseModelLoader):
    """Loads with the loader that the user asked for, and captures what it loaded.

    Raises:
        ValueError: that loader does not go through vLLM's `load_weights`.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.strategy: WeightStrategy = load_config.model_loader_extra_config["strategy"]
        user: LoadConfig = load_config.model_loader_extra_config["user"]
        self.loader: BaseModelLoader = get_model_loader(user)
        if type(self.loader).load_model is not BaseModelLoader.load_model:
            raise ValueError(
                f"load_format {user.load_format!r} does not hand over plain weights, which PAT "
                "needs to derive those of its other layouts. Use auto, safetensors, pt or dummy."
            )

    def get_external_weight_memory(self, vllm_config: VllmConfig) -> int:
        return self.loader.get_external_weight_memory(vllm_config)

    def download_model(self, model_config: ModelConfig) -> None:
        self.loader.download_model(model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """For vLLM's `reload_weights`; a loader that cannot read weights again lacks it."""
        return self.loader.get_all_weights(model_config, model)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        # An unsupported model should fail before its weights are read, which may take minutes.
        self.strategy.check(model)
        self.loader.load_weights(model, model_config)
        self.strategy.capture(model)


@register_model_loader(DERIVED_FORMAT)
class DerivedLayoutLoader(BaseModelLoader):
    """Fills the model from the base layout's weights; touches no file."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.strategy: WeightStrategy = load_config.model_loader_extra_config["strategy"]

    def download_model(self, model_config: ModelConfig) -> None:
        pass

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        self.strategy.fill(model)

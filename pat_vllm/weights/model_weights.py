"""The weights of a vLLM model, and how tensor parallelism cuts each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.conv import ConvLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
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
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import (
    MambaMixer2,
    Mixer2RMSNormGated,
    mamba_v2_sharded_weight_loader,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.gpt_oss import OAIAttention

from pat_vllm.layout import Place
from pat_vllm.weights.experts import EXPERTS, check_experts, check_gates, expert_cuts, expert_place
from pat_vllm.weights.kv_scales import KV_SCALES
from pat_vllm.weights.shards import (
    Cut,
    EvenPartition,
    Partition,
    QKVPartition,
    VocabPartition,
    pieces_of,
)

# From the most derived class to the least: the first match decides.
SHARDED_LAYERS = (
    QKVParallelLinear,
    MergedColumnParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    ParallelLMHead,
    VocabParallelEmbedding,
    *EXPERTS,
    OAIAttention,
    QwenGatedDeltaNetAttention,
    MambaMixer2,
    Mixer2RMSNormGated,
)
# Their weights are whole on every rank, in every layout.
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


_WHOLE = Place(tp=1, tp_rank=0)
"""The place of a weight that nothing cuts."""


@dataclass(frozen=True, eq=False)
class Weight:
    """One parameter or persistent buffer of a model.

    Attributes:
        tensor: one rank's shard, or the whole weight if nothing cuts it. It shares its storage
            with the parameter, and keeps it when vLLM gives the parameter other data.
        cuts: at most one for each dimension; none for a weight that is whole on every rank.
        place: the rank's place, by which `cuts` choose its shard.
        module, attribute: where the model has it.
    """

    name: str
    tensor: torch.Tensor
    cuts: tuple[Cut, ...]
    place: Place
    module: nn.Module
    attribute: str

    @property
    def storage(self) -> int:
        """Identity of the memory; alike for tied weights."""
        return int(self.tensor.untyped_storage()._cdata)

    @property
    def current(self) -> torch.Tensor:
        """What the model has there now."""
        return getattr(self.module, self.attribute).data  # type: ignore[no-any-return]

    def bind(self, tensor: torch.Tensor) -> None:
        """Have the model use another tensor."""
        getattr(self.module, self.attribute).data = tensor


def model_weights(model: nn.Module) -> Iterator[Weight]:
    """Every weight of a vLLM model, in module order, tied ones once for each module.

    Scales of the KV cache are none (`kv_scales.py`).

    Raises:
        ValueError: a module's weights cannot be derived for another layout.
    """
    convolutions: dict[nn.Module, Partition] = {}
    for path, module in model.named_modules():
        if isinstance(module, MoERunner):
            check_gates(path, module)
        if isinstance(module, QwenGatedDeltaNetAttention):
            # vLLM has one matrix, whose parts for queries, keys and values are cut one by one.
            sizes = module.key_dim, module.key_dim, module.value_dim
            convolutions[module.conv1d] = EvenPartition(sizes)
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        if isinstance(module, Attention | MLAAttention):
            # Scales, until they are in buffers (`kv_scales.py`). And vLLM makes some of
            # `kv_b_proj`; see `renew_absorbed`.
            parameters = {}
        layer = _layer_class(path, module) if parameters else None
        for name, parameter in parameters.items():
            full_name = f"{path}.{name}".lstrip(".")
            cuts: tuple[Cut, ...] = ()
            if module in convolutions and _has_loader_of(mamba_v2_sharded_weight_loader, parameter):
                cuts = (Cut(convolutions[module]),)
            elif layer is not None and not getattr(module, "disable_tp", False):
                cuts = _cuts(full_name, module, layer, name, parameter)
            place = _place(module) if cuts else _WHOLE
            yield Weight(full_name, parameter.data, cuts, place, module, name)
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}".lstrip(".")
            if isinstance(module, MambaMixer2) and name == "conv_weights":
                # Its kernels read the convolution's weight by this view.
                cuts = _known_cuts(full_name, module.conv1d, "weight") or ()
                yield Weight(full_name, buffer.data, cuts, _place(module), module, name)
            elif name not in module._non_persistent_buffers_set and name not in KV_SCALES:
                yield Weight(full_name, buffer.data, (), _WHOLE, module, name)


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
    if isinstance(module, RoutedExperts):
        check_experts(path, module)
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


def _has_loader_of(make: Callable[..., Any], parameter: nn.Parameter) -> bool:
    """Whether `make`, a function of vLLM's, has made a parameter's weight loader."""
    loader = getattr(parameter, "weight_loader", None)
    return getattr(loader, "__qualname__", "").startswith(f"{make.__qualname__}.<locals>")


def _place(module: nn.Module) -> Place:
    """The rank's place, by which vLLM has cut a module's weights."""
    if isinstance(module, RoutedExperts):
        return expert_place(module)
    if isinstance(module, QwenGatedDeltaNetAttention | Mixer2RMSNormGated):
        return Place(module.tp_size, module.tp_rank)
    layer: nn.Module = module
    if isinstance(module, OAIAttention | MambaMixer2):
        layer = module.qkv_proj if isinstance(module, OAIAttention) else module.in_proj
    assert isinstance(layer, LinearBase | VocabParallelEmbedding)
    return Place(layer.tp_size, layer.tp_rank)


def _cuts(
    full_name: str,
    module: nn.Module,
    layer: type[nn.Module],
    name: str,
    parameter: nn.Parameter,
) -> tuple[Cut, ...]:
    """How layouts cut a parameter. Raises ValueError if it lacks its layer's weight loader."""
    if isinstance(module, RoutedExperts) and parameter is module.e_score_correction_bias:
        return ()  # it is the router's, which every rank has whole
    cuts = _known_cuts(full_name, module, name)
    loader = getattr(getattr(parameter, "weight_loader", None), "__func__", None)
    own = _weight_loaders(layer)  # without one, the model's `load_weights` or a function cuts it
    if cuts is None or (loader not in own if own else loader is not None):
        raise ValueError(
            f"{full_name} ({layer.__name__}) does not have its layer's own weight loader: either "
            "this model loads it in a way of its own, and cannot be used with PAT, or vLLM has "
            "packed it for its kernels, and its plain values are gone."
        )
    return cuts


def _known_cuts(full_name: str, module: nn.Module, name: str) -> tuple[Cut, ...] | None:
    """How layouts cut a layer's weight, by its name; None: the layer has no weight of that name."""
    if isinstance(module, RoutedExperts):
        return expert_cuts(module, name)
    if isinstance(module, OAIAttention):
        heads = EvenPartition((module.num_attention_heads,))
        return (Cut(heads),) if name == "sinks" else None
    if isinstance(module, QwenGatedDeltaNetAttention):
        heads = EvenPartition((module.num_v_heads,))
        return (Cut(heads),) if name in ("A_log", "dt_bias") else None
    if isinstance(module, MambaMixer2):
        heads = EvenPartition((module.num_heads,))
        return (Cut(heads),) if name in ("A", "D", "dt_bias") else None
    if name not in ("weight", "bias"):
        return None
    partition = _partition(full_name, module, name)
    return () if partition is None else (Cut(partition),)


def _partition(full_name: str, module: nn.Module, name: str) -> Partition | None:
    """How a layer's weight or bias is cut; None: every rank has it whole."""
    if isinstance(module, Mixer2RMSNormGated):
        return EvenPartition((module.full_hidden_size,))
    if isinstance(module, RowParallelLinear):
        return EvenPartition((module.input_size,), dim=1) if name == "weight" else None
    if isinstance(module, QKVParallelLinear):
        return QKVPartition(
            module.total_num_heads,
            module.total_num_kv_heads,
            module.head_size,
            module.v_head_size,
        )
    if isinstance(module, MergedColumnParallelLinear):
        return EvenPartition(tuple(module.output_sizes))
    if isinstance(module, ColumnParallelLinear):
        return EvenPartition((module.output_size,))
    assert isinstance(module, VocabParallelEmbedding)
    if module.num_added_embeddings:
        raise ValueError(
            f"{full_name} has {module.num_added_embeddings} embeddings added to the model's own: "
            "PAT does not derive those. Use a static tensor_parallel_size without PAT."
        )
    return VocabPartition(module.org_vocab_size, module.padding_size)


def matching_weights(
    model: nn.Module, base: Mapping[str, Weight]
) -> Iterator[tuple[Weight, Weight]]:
    """Each weight of another layout's model, with the base layout's of that name.

    Raises:
        ValueError: the model's weights are not those of the base model cut another way.
    """
    derived = {weight.name: weight for weight in model_weights(model)}
    if unmatched := derived.keys() ^ base.keys():
        raise ValueError(
            f"{min(unmatched)} exists in only one of the base layout's model and another's: "
            "this model cannot be used with PAT"
        )
    sources: dict[int, int] = {}
    for name, weight in derived.items():
        match = base[name]
        # The two may be tied in this layout only if they are in the base layout.
        if sources.setdefault(weight.storage, match.storage) != match.storage:
            raise ValueError(f"{name} shares its storage here, but not in the base layout")
        _check_match(weight, match)
        yield weight, match


def _check_match(weight: Weight, base: Weight) -> None:
    if weight.cuts != base.cuts or weight.tensor.dtype != base.tensor.dtype:
        raise ValueError(
            f"{weight.name} differs between layouts by more than how it is cut: "
            f"{base.cuts}, {base.tensor.dtype} for {base.place} and "
            f"{weight.cuts}, {weight.tensor.dtype} for {weight.place}"
        )
    for checked in (weight, base):
        shape = list(base.tensor.shape)
        for cut in checked.cuts:
            shape[cut.dim] = cut.shard(checked.place).size
        if list(checked.tensor.shape) != shape:
            raise ValueError(
                f"{checked.name} has shape {tuple(checked.tensor.shape)} where its layer implies "
                f"{tuple(shape)}: this model cuts it in a way of its own, and cannot be used with "
                "PAT"
            )


@torch.no_grad()
def derive(weight: Weight, base: Weight) -> None:
    """Copy a weight's shard out of the base layout's, into the storage that it has."""
    shards = [cut.shard(weight.place) for cut in weight.cuts]
    if any(sum(piece.length for piece in shard.pieces) < shard.size for shard in shards):
        weight.tensor.zero_()
    copies = (
        pieces_of(shard, cut.shard(base.place))
        for cut, shard in zip(weight.cuts, shards, strict=True)
    )
    for pieces in product(*copies):
        into, out_of = weight.tensor, base.tensor
        for cut, piece in zip(weight.cuts, pieces, strict=True):
            into = into.narrow(cut.dim, piece.dst, piece.length)
            out_of = out_of.narrow(cut.dim, piece.src, piece.length)
        into.copy_(out_of)

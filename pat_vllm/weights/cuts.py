"""How tensor parallelism cuts the weights of vLLM's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from vllm.model_executor.layers.conv import ConvLayerBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
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
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.gpt_oss import OAIAttention

from pat_vllm.layout import Place
from pat_vllm.weights.experts import EXPERTS, check_experts, expert_cuts, expert_place
from pat_vllm.weights.shards import (
    Cut,
    EvenPartition,
    Partition,
    QKVPartition,
    VocabPartition,
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
WHOLE_PARAMETERS = frozenset({"draft_id_to_target_id", "mm_input_projection_weight"})
"""Parameters of models themselves, not of layers, that every rank has whole: of EAGLE-3's drafters,
which of the target's tokens each token of their vocabulary is; Gemma 3's projector of images."""


def layer_class(path: str, module: nn.Module) -> type[nn.Module] | None:
    """The class of `SHARDED_LAYERS` that `module` is loaded as; None for a replicated one."""
    unquantized = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    if isinstance(module, LinearBase | VocabParallelEmbedding) and not isinstance(
        module.quant_method, unquantized
    ):
        raise ValueError(
            f"{path} ({type(module).__name__}) is quantized with "
            f"{type(module.quant_method).__name__}, of which PAT cannot derive weights for other "
            "layouts. Use an unquantized checkpoint, or a static tensor_parallel_size without PAT."
        )
    if isinstance(module, RoutedExperts):
        check_experts(path, module)
    return sharded_class(path, module)


def sharded_class(path: str, module: nn.Module) -> type[nn.Module] | None:
    """As `layer_class`, whether the module is quantized or not."""
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


def has_own_loader(parameter: nn.Parameter, layer: type[nn.Module]) -> bool:
    """Whether a parameter is loaded by a method of its layer's class."""
    loader = getattr(parameter, "weight_loader", None)
    while (wrapped := getattr(loader, "__wrapped__", None)) is not None:
        loader = wrapped  # of online quantization's
    function = getattr(loader, "__func__", None)
    own = _weight_loaders(layer)  # without one, the model's `load_weights` or a function cuts it
    return function in own if own else function is None


def has_loader_of(make: Callable[..., Any], parameter: nn.Parameter) -> bool:
    """Whether `make`, a function of vLLM's, has made a parameter's weight loader."""
    loader = getattr(parameter, "weight_loader", None)
    return getattr(loader, "__qualname__", "").startswith(f"{make.__qualname__}.<locals>")


def place_of(module: nn.Module) -> Place:
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


def cuts_of(
    full_name: str,
    module: nn.Module,
    layer: type[nn.Module],
    name: str,
    parameter: nn.Parameter,
) -> tuple[Cut, ...]:
    """How layouts cut a parameter. Raises ValueError if it lacks its layer's weight loader."""
    if isinstance(module, RoutedExperts) and parameter is module.e_score_correction_bias:
        return ()  # it is the router's, which every rank has whole
    cuts = known_cuts(full_name, module, name)
    if cuts is None or not has_own_loader(parameter, layer):
        raise ValueError(
            f"{full_name} ({layer.__name__}) does not have its layer's own weight loader: either "
            "this model loads it in a way of its own, and cannot be used with PAT, or vLLM has "
            "packed it for its kernels, and its plain values are gone."
        )
    return cuts


def known_cuts(full_name: str, module: nn.Module, name: str) -> tuple[Cut, ...] | None:
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

"""The weights of a vLLM model, and how tensor parallelism cuts each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import (
    MambaMixer2,
    mamba_v2_sharded_weight_loader,
)

from pat_vllm.weights.cuts import (
    WHOLE_PARAMETERS,
    cuts_of,
    has_loader_of,
    known_cuts,
    layer_class,
    place_of,
)
from pat_vllm.weights.experts import check_gates
from pat_vllm.weights.fp8 import Fp8Experts, Fp8Linear
from pat_vllm.weights.kv_scales import KV_SCALES, KVScales
from pat_vllm.weights.marlin import MarlinFp8Linear, refuse_absorbed
from pat_vllm.weights.quantized import QuantizedLayer
from pat_vllm.weights.shards import Cut, EvenPartition, Partition
from pat_vllm.weights.weight import WHOLE, Weight, shape_in

KINDS: tuple[type[QuantizedLayer], ...] = (MarlinFp8Linear, Fp8Linear, Fp8Experts, KVScales)
"""The kinds of quantized weights that layouts can share; the first that a layer is of counts."""


def quantized_layer(path: str, module: nn.Module) -> QuantizedLayer | None:
    """A module as a layer with quantized weights; None: it has none that PAT knows.

    Raises:
        ValueError: layouts cannot share them; says what helps.
    """
    found = (kind.of(path, module) for kind in KINDS)
    return next((layer for layer in found if layer is not None), None)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """The layers of a model with quantized weights, by name."""
    every = ((path, quantized_layer(path, module)) for path, module in model.named_modules())
    return {path: layer for path, layer in every if layer is not None}


def model_weights(model: nn.Module) -> Iterator[Weight]:
    """Every plain weight of a vLLM model, in module order, tied ones once for each module.

    Those of quantized layers have their form after vLLM has processed them: see
    `QuantizedLayer.weights`. Scales of the KV cache are none (`kv_scales.py`).

    Raises:
        ValueError: a module's weights cannot be derived for another layout.
    """
    convolutions: dict[nn.Module, Partition] = {}
    for path, module in model.named_modules():
        if isinstance(module, MoERunner):
            check_gates(path, module)
        elif isinstance(module, MLAAttention):
            refuse_absorbed(path, module)
        if (quantized := quantized_layer(path, module)) is not None:
            for name, parameter in module.named_parameters(recurse=False):
                if name not in quantized.parameters():  # such as one that another module has, too
                    yield Weight(f"{path}.{name}", parameter.data, (), WHOLE, module, name)
            continue
        if isinstance(module, QwenGatedDeltaNetAttention):
            # vLLM has one matrix, whose parts for queries, keys and values are cut one by one.
            sizes = module.key_dim, module.key_dim, module.value_dim
            convolutions[module.conv1d] = EvenPartition(sizes)
        parameters = {name: p for name, p in module._parameters.items() if p is not None}
        for name in WHOLE_PARAMETERS & parameters.keys():
            parameter = parameters.pop(name)
            yield Weight(f"{path}.{name}".lstrip("."), parameter.data, (), WHOLE, module, name)
        if isinstance(module, Attention | MLAAttention):
            # Scales, until they are in buffers (`kv_scales.py`). And vLLM makes some of
            # `kv_b_proj`; see `renew_absorbed`.
            parameters = {}
        layer = layer_class(path, module) if parameters else None
        for name, parameter in parameters.items():
            full_name = f"{path}.{name}".lstrip(".")
            cuts: tuple[Cut, ...] = ()
            if module in convolutions and has_loader_of(mamba_v2_sharded_weight_loader, parameter):
                cuts = (Cut(convolutions[module]),)
            elif layer is not None and not getattr(module, "disable_tp", False):
                cuts = cuts_of(full_name, module, layer, name, parameter)
            place = place_of(module) if cuts else WHOLE
            yield Weight(full_name, parameter.data, cuts, place, module, name)
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}".lstrip(".")
            if isinstance(module, MambaMixer2) and name == "conv_weights":
                # Its kernels read the convolution's weight by this view.
                cuts = known_cuts(full_name, module.conv1d, "weight") or ()
                yield Weight(full_name, buffer.data, cuts, place_of(module), module, name)
            elif name not in module._non_persistent_buffers_set and name not in KV_SCALES:
                yield Weight(full_name, buffer.data, (), WHOLE, module, name)


def matching_weights(
    weights: Iterable[Weight], base: Mapping[str, Weight]
) -> Iterator[tuple[Weight, Weight]]:
    """Each weight of another layout's model, with the base layout's of that name.

    Raises:
        ValueError: the model's weights are not those of the base model cut another way.
    """
    derived = {weight.name: weight for weight in weights}
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
        shape = shape_in(base, checked.place, checked.unit)
        if list(checked.tensor.shape) != shape:
            raise ValueError(
                f"{checked.name} has shape {tuple(checked.tensor.shape)} where its layer implies "
                f"{tuple(shape)}: this model cuts it in a way of its own, and cannot be used with "
                "PAT"
            )

"""The scales by which attention layers keep keys and values in 8 bits: the same in all layouts.

vLLM has each in a buffer, and once more on the host, where some kernels want it. Of a model with
quantized weights `KVScales` (`fp8.py`) has the base layout's processed ones in every layout. Here
is what holds for any model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

_ON_HOST = ("_k_scale_float", "_v_scale_float", "_q_scale_float", "_prob_scale_float")
_ON_HOST_TENSORS = ("_k_scale_cpu", "_v_scale_cpu")


def share_kv_scales(model: nn.Module, base: nn.Module) -> None:
    """Give the attention layers of a layout's model the base layout's scales on the host.

    Those on the device are weights. To be called when these are there.
    """
    of_base = dict(_attention_layers(base))
    for name, layer in _attention_layers(model):
        for scale in _ON_HOST:
            setattr(layer, scale, getattr(of_base[name], scale))
        for scale in _ON_HOST_TENSORS:
            getattr(layer, scale).copy_(getattr(of_base[name], scale))


def kv_scales(model: nn.Module) -> list[float]:
    """The scales of keys and values in all layers that keep them in 8 bits, on device and host.

    What is in a KV cache means something else where they change.
    """
    layers = [
        layer
        for _, layer in _attention_layers(model)
        if is_quantized_kv_cache(layer.kv_cache_dtype)  # type: ignore[arg-type]
    ]
    if not layers:
        return []
    on_device = [scale.reshape(()) for each in layers for scale in (each._k_scale, each._v_scale)]
    on_host = [scale for each in layers for scale in (each._k_scale_float, each._v_scale_float)]
    return torch.stack(on_device).tolist() + on_host  # type: ignore[arg-type, no-any-return]


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if "_k_scale" in module._buffers:
            yield name, module

"""The scales by which attention layers keep keys and values in 8 bits: the same in all layouts.

They are numbers of a layer, which a checkpoint may have, and no weights that tensor parallelism
cuts. vLLM has each in a buffer on the device and once more on the host, where its kernels want it,
and makes both of parameters that it then deletes. In a layout that reads no checkpoint it makes
them of none, so that they become 1. So layouts share the base layout's buffers only when vLLM is
done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import nn
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from pat_vllm.layout import Place
from pat_vllm.weights.quantized import QuantizedLayer
from pat_vllm.weights.weight import WHOLE, Weight

KV_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")
"""Names of the buffers, of shape () or (1,), in float32."""
_ON_HOST = ("_k_scale_float", "_v_scale_float", "_q_scale_float", "_prob_scale_float")
_ON_HOST_TENSORS = ("_k_scale_cpu", "_v_scale_cpu")


class KVScales(QuantizedLayer):
    """Attention for which a checkpoint may have scales. In other layouts there are none to read:
    vLLM does not process them, and `share_kv_scales` gives them the base layout's."""

    @classmethod
    def of(cls, path: str, module: nn.Module) -> Self | None:
        if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            return cls(path, module, WHOLE)
        return None

    def check(self, places: Iterable[Place]) -> None:
        """Every rank has them whole."""

    def weights(self) -> Iterator[Weight]:
        return iter(())

    def finish(self, module: nn.Module) -> None:
        """There is nothing to do yet."""


def share_kv_scales(model: nn.Module, base: nn.Module) -> None:
    """Have the attention layers of a layout's model use the scales of the base layout's.

    To be called when vLLM has processed both, and after each update.

    Raises:
        ValueError: a layer has a scale for each of its heads, which layouts cut.
    """
    of_base = dict(_attention_layers(base))
    for name, layer in _attention_layers(model):
        for scale in KV_SCALES:
            shared = getattr(of_base[name], scale)
            if shared.numel() != 1:
                raise ValueError(
                    f"{name} has {shared.numel()} values in {scale}: PAT serves one scale for all "
                    "KV heads of a layer (kv_cache_scheme.strategy='tensor')"
                )
            setattr(layer, scale, shared)
        for scale in _ON_HOST:
            setattr(layer, scale, getattr(of_base[name], scale))
        for scale in _ON_HOST_TENSORS:
            getattr(layer, scale).copy_(getattr(of_base[name], scale))


def kv_scales(model: nn.Module) -> list[float]:
    """The scales of keys and values in all layers that keep them in 8 bits, on device and host.

    What is in a KV cache means something else where they change.
    """
    every = (layer for _, layer in _attention_layers(model))
    layers = [layer for layer in every if is_quantized_kv_cache(layer.kv_cache_dtype)]
    if not layers:
        return []
    on_device = [scale.reshape(()) for each in layers for scale in (each._k_scale, each._v_scale)]
    on_host = [scale for each in layers for scale in (each._k_scale_float, each._v_scale_float)]
    return [*torch.stack(on_device).tolist(), *on_host]


def _attention_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, KV_SCALES[0]):
            yield name, module

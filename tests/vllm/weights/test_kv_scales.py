"""Scales of a KV cache in 8 bits: of the base layout's checkpoint, in every layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CacheConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

from pat_vllm.executor.messages import Refreshed
from pat_vllm.layout import Layout
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.kv_scales import kv_scales, share_kv_scales
from pat_vllm.weights.loaders import WeightStrategy
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.worker.layout_weights import LayoutWeights
from tests.support.models import random_model
from tests.vllm.weights.test_weights import as_rank, vllm_config_for

LAYOUTS = [Layout.of(tp, 2) for tp in (1, 2)]
LOADED = {"q_scale": 3.0, "k_scale": 0.5, "v_scale": 0.25}


def compressed_tensors(strategy: str) -> CompressedTensorsConfig:
    """Weights as they are, KV in 8 bits."""
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    config = CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {},
            "ignore": [],
            "kv_cache_scheme": {**scheme, "symmetric": True},
        }
    )
    config.total_num_heads, config.total_num_kv_heads = 4, 2  # type: ignore[attr-defined]
    return config


KINDS = {
    "fp8": lambda: Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic"),
    "compressed-tensors": lambda: compressed_tensors("tensor"),
}


def model(quantization: Any, tp: int, kv_cache_dtype: str = "fp8") -> nn.Module:
    """Two layers of attention, as a runner builds them at this tp, not processed yet."""
    layers, config = nn.ModuleList(), vllm_config_for(random_model("qwen3"), tp)
    with set_current_vllm_config(config), as_rank(tp, 0):
        for i in range(2):
            cache = CacheConfig(cache_dtype=kv_cache_dtype)
            layers.append(
                Attention(
                    4 // tp, 32, 1.0, max(1, 2 // tp), cache_config=cache,
                    quant_config=quantization, prefix=f"layers.{i}.attn",
                )
            )  # fmt: skip
    return layers


def load(model: nn.Module, factor: float = 1.0) -> None:
    """Scales of a checkpoint, others in each layer."""
    for i, layer in enumerate(model.children()):
        for name, value in LOADED.items():
            getattr(layer, name).data.fill_(factor * value * (i + 1))


def process(model: nn.Module) -> None:
    """As vLLM's loaders do at their end."""
    for layer in model.children():
        layer.quant_method.process_weights_after_loading(layer)


def assert_scales(model: nn.Module, factor: float = 1.0) -> None:
    for i, layer in enumerate(model.children()):
        for name, value in LOADED.items():
            expected = factor * value * (i + 1)
            assert getattr(layer, f"_{name}") == expected == getattr(layer, f"_{name}_float"), name
            if name != "q_scale":
                assert getattr(layer, f"_{name}_cpu") == expected, name
        assert layer._prob_scale == 1.0


@pytest.mark.parametrize("strategy", ["inplace", "materialized"])
@pytest.mark.parametrize("quantization", KINDS)
def test_layouts_have_the_scales_of_the_checkpoint(quantization: str, strategy: str) -> None:
    """A layout that reads no checkpoint would have vLLM write 1 where the base layout's are."""
    shards: WeightStrategy = (
        InPlaceShards(LAYOUTS, 0) if strategy == "inplace" else MaterializedShards()
    )
    base, other = (model(KINDS[quantization](), layout.tp) for layout in LAYOUTS)
    load(base)
    shards.capture(base)
    process(base)
    shards.fill(other)
    process(other)
    weights = LayoutWeights.__new__(LayoutWeights)
    weights._strategy, weights._packed = shards, False
    weights._runtimes = tuple(
        SimpleNamespace(runner=SimpleNamespace(get_model=lambda it=it: it))  # type: ignore[misc]
        for it in (base, other)
    )
    weights._base = weights._runtimes[0]
    weights.finish_loading()
    assert_scales(base)
    assert_scales(other)
    assert weights.refresh(LAYOUTS[0]) is Refreshed.DONE

    for layer in base.children():  # as vLLM's reload of a checkpoint with others
        layer.quant_method.create_weights(layer)
    load(base, 2.0)
    process(base)
    assert weights.refresh(LAYOUTS[0]) is Refreshed.WITH_OTHER_KV_SCALES
    assert_scales(base, 2.0)
    assert_scales(other, 2.0)
    assert weights.refresh(LAYOUTS[0]) is Refreshed.DONE


def test_only_a_cache_in_8_bits_depends_on_scales() -> None:
    quantized, plain = (model(None, 1, dtype) for dtype in ("fp8_e5m2", "auto"))
    assert kv_scales(quantized) == [1.0] * 8 and kv_scales(plain) == []
    before = kv_scales(quantized)
    quantized[1]._v_scale.fill_(0.5)  # type: ignore[index]
    assert kv_scales(quantized) != before


def test_scales_of_each_head_are_refused() -> None:
    base, other = model(None, 1), model(None, 2)
    base[0]._k_scale = torch.ones(2)  # type: ignore[index]
    with pytest.raises(ValueError, match="2 values in _k_scale: PAT serves one scale for all"):
        share_kv_scales(other, base)

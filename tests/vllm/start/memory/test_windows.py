"""The KV that `memory_estimate.py` grants a model with sliding windows, against vLLM's own plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import Device
from pat_vllm.models.kinds import class_of
from pat_vllm.models.model_size import ModelSize
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.memory_estimate import estimate
from tests.gpuless.planning import planning

BLOCK, KV = 16, 4 << 30
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 6912,
    "vocab_size": 262144,
    "sliding_window": 512,
}


@pytest.mark.parametrize("every", [6, 3, 2])
@pytest.mark.parametrize("context", [2048, 16384])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_contexts_that_fit(every: int, context: int, tp: int) -> None:
    """Of one layer in `every` full attention, what vLLM's blocks hold of the longest contexts."""
    layers = GEMMA3["num_hidden_layers"]
    names = [f"layers.{i}" for i in range(layers)]
    kinds = ["full" if i % every == every - 1 else "sliding" for i in range(layers)]
    sizes: dict[str, Any] = dict(
        block_size=BLOCK, num_kv_heads=4 // tp, head_size=256, dtype=torch.bfloat16
    )
    specs = {
        name: FullAttentionSpec(**sizes)
        if kind == "full"
        else SlidingWindowSpec(**sizes, sliding_window=512)
        for name, kind in zip(names, kinds, strict=True)
    }
    config = VllmConfig()
    config.cache_config.kv_cache_layout = "HND"
    groups = planning.get_kv_cache_groups(config, specs)
    planned = planning.get_kv_cache_config_from_groups(config, groups, KV)
    a_context = 0
    for group in planned.kv_cache_groups:
        kind = class_of(group.kv_cache_spec)
        assert kind is not None
        a_context += len(kind.of(group.kv_cache_spec, 4, layers=1).held(context))
    fits = planned.num_blocks / a_context * context

    model = ModelSize.of(
        GEMMA3 | {"layer_types": [f"{kind}_attention" for kind in kinds]}, dtype_bytes=2
    )
    shape = EngineShape(
        (Layout(tp, 1),), max_model_len=context, block_size=BLOCK, kv_cache_memory_bytes=KV
    )
    assert estimate(model, shape, Device(80 << 30)).kv_tokens[tp] == pytest.approx(fits, rel=0.02)

"""Mamba2 keeps the state of a request's last token alone, as layouts can share it."""

from __future__ import annotations

from dataclasses import replace

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from pat_vllm.layout import Place
from pat_vllm.models.kinds import LinearAttention, class_of
from pat_vllm.patches.linear_attention import end_prompts_parts_with_blocks
from tests.support.models import random_model
from tests.vllm.weights.test_weights import as_rank, build, vllm_config_for


def test_no_state_is_kept_from_within_a_step() -> None:
    """The one that vLLM would keep there takes a block of which no kind knows."""
    with set_current_vllm_config(VllmConfig()):
        config = vllm_config_for(random_model("nemotron_h"), tp=1)
        model = build(config, Place(tp=1, tp_rank=0))
    config.cache_config.mamba_block_size = 64
    layers = [module for module in model.modules() if isinstance(module, MambaMixer2)]
    with as_rank(1, 0):
        stock = [layer.get_kv_cache_spec(config) for layer in layers]
        end_prompts_parts_with_blocks(model)
        plain = [layer.get_kv_cache_spec(config) for layer in layers]
    none = {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None}
    assert plain == [replace(spec, **none) for spec in stock if spec is not None]
    assert len(plain) == 4 and plain != stock
    assert {class_of(spec) for spec in plain} == {LinearAttention}
    assert {class_of(spec) for spec in stock} == {None}

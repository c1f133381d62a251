"""Blocks of models with linear attention: vLLM's own sizes, and what layouts make of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import Device
from pat_vllm.models.kinds import LinearAttention, num_blocks
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.memory_estimate import estimate
from pat_vllm.worker.layout_config import keep_block_size, kinds_of, layout_kv_cache_config
from tests.gpuless.planning import planning

SIZES = {**MODEL_SHAPES["qwen3-next-80b-a3b"], "mamba_ssm_dtype": "float32"}
"""With states in 32 bits, as vLLM has them on CPU."""


class Backend:
    """Of attention: blocks of any multiple of 16 tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def customize_spec(spec: Any) -> Any:
        return spec


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, VllmConfig]:
    """Of Qwen3-Next's sizes, by tp, before vLLM has looked at its layers."""
    monkeypatch.setattr(
        Platform, "_find_non_ssm_backends", classmethod(lambda cls, config: [Backend])
    )
    given = {**SIZES, "architectures": ["Qwen3NextForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    options: Any = {"dtype": "bfloat16", "max_model_len": 32768, "skip_tokenizer_init": True}
    options["mamba_ssm_cache_dtype"] = "float32"  # as on a CPU with AMX, or by the model
    engine = EngineArgs(str(tmp_path), enforce_eager=True, **options).create_engine_config()
    assert engine.cache_config.mamba_ssm_cache_dtype == "float32"
    engine.cache_config.block_size, engine.cache_config.user_specified_block_size = 16, False
    by_tp = {}
    for tp in (1, 2, 4, 8):
        by_tp[tp] = copy.copy(engine)
        by_tp[tp].parallel_config = copy.copy(engine.parallel_config)
        by_tp[tp].parallel_config.tensor_parallel_size = tp
        by_tp[tp].cache_config = copy.copy(engine.cache_config)
    return by_tp


def slot(config: VllmConfig, drafts: int = 0) -> MambaSpec:
    """As a layer has it."""
    cache = config.cache_config
    return MambaSpec(
        block_size=cache.mamba_block_size or 0,
        shapes=Qwen3NextForCausalLM.get_mamba_state_shape_from_config(config),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=cache.mamba_page_size_padded,
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode=cache.mamba_cache_mode,
        num_speculative_blocks=drafts,
    )


def test_vllms_own_blocks_are_as_computed(configs: dict[int, VllmConfig]) -> None:
    model = ModelSize.of(SIZES)
    for tp, config in configs.items():
        Platform._align_hybrid_block_size(config, Backend)  # type: ignore[arg-type]
        assert config.cache_config.block_size == model.block_size(tp, 16)
        assert slot(config).state_content_size_bytes == model.state_bytes(tp) // 36
    assert [config.cache_config.block_size for config in configs.values()] == [1056, 1056, 528, 272]


def test_layouts_have_one_size_of_blocks(configs: dict[int, VllmConfig]) -> None:
    """And slots that are padded to them, as vLLM itself does it."""
    base, *wider = configs
    Platform._align_hybrid_block_size(configs[base], Backend)  # type: ignore[arg-type]
    first = slot(configs[base])
    kind = LinearAttention.of(first, LinearAttention.heads_in(first, 2, base), layers=12)
    for tp in wider:
        keep_block_size(configs[tp], configs[base])
        Platform.update_block_size_for_backend(configs[tp])
        assert configs[tp].cache_config.block_size == 1056
        narrow = kind.narrow(first, Layout.of(tp, 8), ratio=2)
        assert narrow == slot(configs[tp])
        filled = narrow.state_content_size_bytes / narrow.page_size_bytes
        print(f"tp={tp}: a slot fills {filled:.0%} of its block")
        assert filled == pytest.approx(2 / tp, rel=0.02)


@pytest.mark.parametrize(("base_tp", "drafts"), [(1, 0), (2, 0), (1, 3)])
@pytest.mark.parametrize("blocks", [2, 31])
def test_contexts_that_fit(
    configs: dict[int, VllmConfig], blocks: int, base_tp: int, drafts: int
) -> None:
    """Of whole blocks, what vLLM's plan holds of the longest contexts, in every layout."""
    base, kv = configs[base_tp], 4 << 30
    Platform._align_hybrid_block_size(base, Backend)  # type: ignore[arg-type]
    size = base.cache_config.block_size
    heads: dict[str, Any] = {"num_kv_heads": 2 // base_tp, "head_size": 256}
    attention = FullAttentionSpec(block_size=size, dtype=torch.bfloat16, **heads)
    slots = slot(base, drafts)
    specs = {f"layers.{i}": attention if i % 4 == 3 else slots for i in range(48)}
    base.cache_config.kv_cache_layout = "HND"
    groups = planning.get_kv_cache_groups(base, specs)
    planned = planning.get_kv_cache_config_from_groups(base, groups, kv)
    layouts = [Layout.of(tp, 8) for tp in (1, 2, 4, 8) if tp >= base_tp]
    kinds = kinds_of(planned, layouts[0], num_kv_heads=2)
    model, context = ModelSize.of(SIZES), blocks * size
    shape = EngineShape(
        tuple(layouts),
        max_model_len=context,
        block_size=16,
        kv_cache_memory_bytes=kv,
        num_speculative_tokens=drafts,
    )
    estimated = estimate(model, shape, Device(80 << 30)).kv_tokens
    for layout in layouts:
        own = layout_kv_cache_config(planned, layout, layouts[0], kinds).num_blocks
        fits = own / num_blocks(kinds, context, room=size) * context
        print(f"{layout}: {fits:.0f} tokens, {estimated[layout.tp]} estimated")
        # Whole blocks are estimated.
        assert estimated[layout.tp] == pytest.approx(fits, rel=0.02, abs=size if drafts else 0)

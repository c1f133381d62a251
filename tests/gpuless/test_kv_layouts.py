"""In each of vLLM's KV cache layouts, layouts of ranks alias layer by layer, or PAT refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from pat_vllm.kv_transfer.kv_buffer import SharedKVBuffer
from pat_vllm.layout import Layout
from pat_vllm.worker.layout_config import KV_LAYOUTS, block_ratio, layout_kv_cache_config
from pat_vllm.worker.runtime import LayoutRuntime
from tests.gpuless.planning import planning
from tests.support.kinds import full

BLOCK_SIZE = 2
HEAD_SIZE = 2


def base_config(
    kv_layout: KVCacheLayout, num_layers: int, num_heads: int, num_blocks: int
) -> KVCacheConfig:
    """As vLLM itself places the layers of a model."""
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=num_heads, head_size=HEAD_SIZE, dtype=torch.float16
    )
    config = VllmConfig()
    config.cache_config.kv_cache_layout = kv_layout.name
    names = [f"layers.{i}" for i in range(num_layers)]
    kv_cache_config: KVCacheConfig = planning.get_kv_cache_config_from_groups(
        config, [KVCacheGroupSpec(names, spec)], spec.page_size_bytes * num_layers * num_blocks
    )
    kv_cache_config.kv_cache_layout = kv_layout.name
    return kv_cache_config


def cells(config: KVCacheConfig, kv_layout: KVCacheLayout) -> dict[str, list[list[int]]]:
    """Where the elements of each block of each layer lie in the buffer."""
    buffer = SharedKVBuffer()
    buffer.buffer = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    numbered = torch.arange(buffer.buffer.numel() // 2)
    return {
        name: torch.as_strided(numbered, view.shape, view.stride(), view.storage_offset())
        .flatten(1)
        .tolist()
        for name, view in buffer.views(config, kv_layout).items()
    }


@settings(deadline=None, max_examples=50)
@given(
    kv_layout=st.sampled_from(KVCacheLayout),
    num_layers=st.integers(1, 3),
    heads_of_last=st.integers(1, 3),
    ratio=st.sampled_from([1, 2, 4]),
    num_blocks=st.integers(1, 4),
)
def test_layouts_alias_or_are_refused(
    kv_layout: KVCacheLayout, num_layers: int, heads_of_last: int, ratio: int, num_blocks: int
) -> None:
    """A layout's KV cache, whose blocks are `ratio` times smaller than those of the base layout."""
    base = base_config(kv_layout, num_layers, heads_of_last * ratio, num_blocks)
    try:
        layouts = Layout.of(ratio, ratio), Layout.of(1, ratio)
        narrow = layout_kv_cache_config(base, *layouts, full(heads_of_last * ratio))
    except ValueError as error:
        assert kv_layout.name not in KV_LAYOUTS
        assert repr(kv_layout.name) in str(error)
        assert "set VLLM_KV_CACHE_LAYOUT=LBHNC or LBNHC" in str(error)
        return
    assert narrow.num_blocks == base.num_blocks * ratio
    (group,) = narrow.kv_cache_groups
    assert isinstance(group.kv_cache_spec, FullAttentionSpec)
    assert group.kv_cache_spec.num_kv_heads == heads_of_last
    of_base, of_layout = cells(base, kv_layout), cells(narrow, kv_layout)
    every = [cell for layer in of_layout.values() for block in layer for cell in block]
    assert len(set(every)) == len(every), "blocks overwrite each other"
    for name, blocks in of_base.items():
        for at, block in enumerate(blocks):
            parts = of_layout[name][at * ratio : (at + 1) * ratio]
            assert sorted(block) == sorted(cell for part in parts for cell in part)


def test_ratios() -> None:
    """Heads are divided until each rank has one, and copied from there on."""
    for heads, ratios in {8: [1, 2, 4, 8], 4: [1, 2, 4, 4], 2: [1, 2, 2, 2], 1: [1] * 4}.items():
        layouts = [Layout.of(tp, 8) for tp in (1, 2, 4, 8)]
        assert [block_ratio(layout, layouts[0], full(heads)) for layout in layouts] == ratios
    assert block_ratio(Layout.of(8, 8), Layout.of(2, 8), full(8)) == 4
    assert block_ratio(Layout.of(8, 8), Layout.of(2, 8), full(2)) == 1


def test_what_vllm_is_offered() -> None:
    """What PAT serves, in the order of the backends."""
    backend = type("Backend", (), {"get_name": staticmethod(lambda: "ROCM_ATTN")})
    compilation = SimpleNamespace(static_forward_context={"layer": backend})
    config: Any = SimpleNamespace(compilation_config=compilation)
    offered = LayoutRuntime(Layout(1, 2), config, group=None).check_kv_cache_layouts  # type: ignore[arg-type]
    assert offered(["LHBNC", "LBNHC", "BLHNC", "LBHNC"]) == ["LBNHC", "LBHNC"]
    with pytest.raises(ValueError, match=r"LBHNC, LBNHC, but .* only LHBNC.*TRITON_ATTN"):
        offered(["LHBNC"])

"""In each of vLLM's KV cache layouts, layouts of ranks alias layer by layer, or PAT refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from pat_vllm.kv_transfer.kv_buffer import SharedKVBuffer
from pat_vllm.layout import Layout
from pat_vllm.worker.layout_config import KV_LAYOUTS, layout_kv_cache_config
from pat_vllm.worker.runtime import LayoutRuntime
from pat_vllm.worker.worker import PATWorkerMixin

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
    made = get_kv_cache_config_from_groups(
        config, [KVCacheGroupSpec(names, spec)], spec.page_size_bytes * num_layers * num_blocks
    )
    made.kv_cache_layout = kv_layout.name
    return made


def cells(config: KVCacheConfig, kv_layout: KVCacheLayout) -> dict[str, list[int]]:
    """Where the elements of each layer lie in the buffer."""
    buffer = SharedKVBuffer()
    buffer.buffer = torch.zeros(config.kv_cache_tensors[0].size, dtype=torch.int8)
    numbered = torch.arange(buffer.buffer.numel() // 2)
    return {
        name: torch.as_strided(numbered, view.shape, view.stride(), view.storage_offset())
        .flatten()
        .tolist()
        for name, view in buffer.views(config, kv_layout).items()
    }


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
    base = base_config(kv_layout, num_layers, heads_of_last * ratio, num_blocks)
    try:
        narrow = layout_kv_cache_config(base, ratio)
    except ValueError as error:
        assert kv_layout.name not in KV_LAYOUTS
        assert repr(kv_layout.name) in str(error) and "VLLM_KV_CACHE_LAYOUT=" in str(error)
        return
    of_base, of_layout = cells(base, kv_layout), cells(narrow, kv_layout)
    every = [cell for layer in of_layout.values() for cell in layer]
    assert len(set(every)) == len(every), "blocks overwrite each other"
    assert {name: sorted(layer) for name, layer in of_base.items()} == {
        name: sorted(layer) for name, layer in of_layout.items()
    }


@pytest.mark.parametrize("kv_layout", KVCacheLayout)
def test_what_is_refused(kv_layout: KVCacheLayout) -> None:
    base = base_config(kv_layout, num_layers=2, num_heads=4, num_blocks=3)
    if kv_layout.name in ("LBNHC", "LBHNC"):
        layout_kv_cache_config(base, 2)
    else:
        with pytest.raises(ValueError, match="set VLLM_KV_CACHE_LAYOUT=LBHNC or LBNHC"):
            layout_kv_cache_config(base, 2)


def worker_of(names: list[str]) -> Any:
    """A worker whose attention backends support these KV cache layouts."""

    class Stock:
        def get_supported_kv_cache_layouts(self) -> list[str]:
            return names

    class Worker(PATWorkerMixin, Stock):
        pass

    backend = type("Backend", (), {"get_name": staticmethod(lambda: "ROCM_ATTN")})
    worker: Any = Worker()
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layer": backend})
    )
    worker._active = LayoutRuntime(Layout(1, 2), config, group=None)  # type: ignore[arg-type]
    return worker


def test_vllm_is_offered_what_pat_serves_in_the_order_of_the_backends() -> None:
    names = ["LHBNC", "LBHNC", "BLHNC", "LBNHC"]
    assert worker_of(names).get_supported_kv_cache_layouts() == ["LBHNC", "LBNHC"]


def test_a_backend_with_none_of_them_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LBHNC, LBNHC, but .* only LHBNC.*TRITON_ATTN"):
        worker_of(["LHBNC"]).get_supported_kv_cache_layouts()

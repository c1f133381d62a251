"""fp8 weights in Marlin's tiles: bit for bit what vLLM packs in each layout, in the base's storage.

vLLM's methods and kernel class process them; see `tests/support/marlin_on_cpu.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pat_vllm.weights.marlin import MarlinFp8Linear
from pat_vllm.weights.model_weights import quantized_layers
from tests.support import marlin_on_cpu
from tests.vllm.weights.test_fp8 import LAYOUTS, check_walk


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Iterator[None]:
    with marlin_on_cpu.applied():
        yield


MODELS = [
    *(("fp8_tiles", how) for how in ("fp8_per_tensor", "fp8_per_block")),
    *((f"fp8_tiles_{how}", None) for how in ("blocks", "channels", "tensors", "modelopt")),
    ("fp8_tiles_bias", "fp8_per_tensor"),
]


@pytest.mark.parametrize("base_tp", [1, 2])
@pytest.mark.parametrize(("name", "how"), MODELS)
def test_every_layout_has_what_vllm_has_there(
    name: str, how: str | None, base_tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [layout for layout in LAYOUTS if layout.tp >= base_tp]
    models = check_walk(name, how, layouts, "tp", monkeypatch)
    of_base = {weight.data_ptr() for weight in models[layouts[0]].parameters()}
    storages = {t.untyped_storage().data_ptr() for t in models[layouts[0]].parameters()}
    for model in models.values():
        layers = quantized_layers(model)
        tiled = [layer for layer in layers.values() if isinstance(layer, MarlinFp8Linear)]
        assert len(tiled) == 4
        for layer in tiled:
            weight = layer.module.weight
            assert weight.dtype == torch.int32 and weight.is_contiguous()
            assert weight.untyped_storage().data_ptr() in storages

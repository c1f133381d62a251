"""fp8 weights in Marlin's tiles: bit for bit what vLLM packs in each layout, in the base's storage.

vLLM's methods and kernel class process them; see `tests/support/marlin_on_cpu.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig

from pat_vllm.layout import Layout
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.marlin import MarlinFp8Linear
from pat_vllm.weights.model_weights import quantized_layers
from tests.support import marlin_on_cpu
from tests.vllm.weights.test_fp8 import LAYOUTS, RANKS, config_of, update, walk
from tests.vllm.weights.test_weights import build


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Iterator[None]:
    with marlin_on_cpu.applied():
        yield


def tiled(model: nn.Module) -> list[MarlinFp8Linear]:
    layers = quantized_layers(model).values()
    return [layer for layer in layers if isinstance(layer, MarlinFp8Linear)]


def check_tiles(models: dict[Layout, nn.Module]) -> None:
    """All of them lie in the base layout's, without gaps."""
    base, *_ = models.values()
    storages = {layer.module.weight.untyped_storage().data_ptr() for layer in tiled(base)}
    for model in models.values():
        assert len(tiled(model)) == len(storages) >= 4
        for layer in tiled(model):
            weight = layer.module.weight
            assert weight.dtype == torch.int32 and weight.is_contiguous()
            assert weight.untyped_storage().data_ptr() in storages


MODELS = [
    *(("fp8_tiles", how) for how in ("fp8_per_tensor", "fp8_per_block")),
    *((f"fp8_tiles_{how}", None) for how in ("blocks", "channels", "tensors", "modelopt")),
    ("fp8_tiles_bias", "fp8_per_tensor"),
    ("fp8_tensors", None),  # three of eight heads for a rank of four, which replicate those of KV
]


@pytest.mark.parametrize("base_tp", [1, 2])
@pytest.mark.parametrize(("name", "how"), MODELS)
def test_every_layout_has_what_vllm_has_there(
    name: str, how: str | None, base_tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [layout for layout in LAYOUTS if layout.tp >= base_tp]
    check_tiles(walk(name, how, layouts, len(name) % RANKS, monkeypatch))


@pytest.mark.parametrize("rank", range(RANKS))
def test_every_rank_has(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tiles(walk("fp8_tiles_blocks", None, LAYOUTS, rank, monkeypatch))


@pytest.mark.parametrize("base_tp", [1, 2])
@pytest.mark.parametrize(
    ("name", "how"), [("fp8_tiles", "fp8_per_tensor"), ("fp8_tiles_channels", None)]
)
def test_an_update_reaches_every_layout(
    name: str, how: str | None, base_tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints' tensors, which vLLM packs into the tiles that the base layout has."""
    layouts = [layout for layout in LAYOUTS if layout.tp >= base_tp]
    check_tiles(update(name, how, layouts, 2, monkeypatch))


@pytest.mark.parametrize(
    ("sizes", "how", "tp", "message"),
    [
        ({"intermediate_size": 96}, "fp8_per_tensor", 2, "96 is not a multiple of 64"),
        (
            {"hidden_size": 320, "head_dim": 64, "num_key_value_heads": 8},
            "fp8_per_tensor",
            8,
            "has 192 x 320 weights for tp=8, which vLLM pads",
        ),
        (
            {"num_attention_heads": 4},
            "fp8_per_block",
            4,
            "256 x 128 .* scales vLLM orders otherwise",
        ),
        # A rank has its KV head and a third of all rows.
        ({"num_key_value_heads": 2}, "fp8_per_tensor", 4, "256 columns are no multiple of 16 x 3"),
    ],
)
def test_sizes_that_are_refused(sizes: dict[str, int], how: str, tp: int, message: str) -> None:
    config = config_of("fp8_tiles", how)
    for name, value in sizes.items():
        assert hasattr(config.model_config.hf_config, name)
        setattr(config.model_config.hf_config, name, value)
    check_refused(config, tp, message)


def test_latent_attention_is_refused() -> None:
    check_refused(config_of("fp8_latent_tensors", None), 2, "mla_attn makes its weights of fp8")


def check_refused(config: VllmConfig, tp: int, message: str) -> None:
    layouts = [Layout.of(tp, tp) for tp in (1, tp)]
    model = build(config, layouts[0].place_of(0))
    with pytest.raises(ValueError, match=message):
        InPlaceShards(layouts, 0).check(model)

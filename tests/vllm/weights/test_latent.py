"""Latent attention: what vLLM makes of `kv_b_proj` follows it, in every layout."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from pat_vllm.layout import Layout, Place
from pat_vllm.patches.weights import keep_plain_weights
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.loaders import WeightStrategy
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.weights.model_weights import model_weights
from pat_vllm.worker.layout_weights import LayoutWeights
from tests.support.models import random_model
from tests.vllm.weights.test_weights import (
    assert_same_weights,
    build,
    in_place,
    load,
    vllm_config_for,
)

RANKS, RANK = 4, 2
LAYOUTS = [Layout.of(tp, RANKS) for tp in (1, 2, 4)]


def absorbed(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {
        f"{path}.{name}": tensor
        for path, module in model.named_modules()
        if isinstance(module, MLAAttention)
        for name, tensor in module.named_parameters(recurse=False)
    }
    assert tensors and {name.rpartition(".")[2] for name in tensors} == {"W_UV", "W_UK_T"}
    return tensors


def processed(config: VllmConfig, model: nn.Module, place: Place) -> nn.Module:
    """The model as a runner has it."""
    keep_plain_weights(model)
    with in_place(place, config.parallel_config):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def stock(config: VllmConfig, layout: Layout) -> nn.Module:
    place = layout.place_of(RANK)
    return processed(config, load(config, place, config.load_config), place)


def with_model(model: nn.Module) -> Any:
    return SimpleNamespace(
        runner=SimpleNamespace(get_model=lambda: model), config=SimpleNamespace(model_config=None)
    )


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    assert_same_weights(model, expected)
    wanted = absorbed(expected)
    for name, tensor in absorbed(model).items():
        assert torch.equal(tensor, wanted[name]), f"{name} is not of the new weights"


@pytest.mark.parametrize("copied", [False, True], ids=["views", "copies"])
@pytest.mark.parametrize("strategy_class", [InPlaceShards, MaterializedShards])
def test_walks_over_layouts_with_updates(strategy_class: type[Any], copied: bool) -> None:
    """Of unquantized weights vLLM makes views. What is a copy is made anew, where it lies."""
    rng = random.Random(0)
    names = "deepseek_v3", "deepseek_v3_updated"
    configs = {name: vllm_config_for(random_model(name), tp=1) for name in names}
    expected = {
        (name, layout): stock(configs[name], layout) for name in names for layout in LAYOUTS
    }
    config, base_layout = configs[names[0]], LAYOUTS[0]
    strategy: WeightStrategy = (
        InPlaceShards(LAYOUTS, RANK) if strategy_class is InPlaceShards else MaterializedShards()
    )
    base: Any = load(config, base_layout.place_of(RANK), config.load_config)
    strategy.capture(base)
    models: dict[Layout, Any] = {base_layout: base}
    for layout in LAYOUTS[1:]:
        models[layout] = build(config, layout.place_of(RANK))
        strategy.fill(models[layout])
    for layout, model in models.items():
        processed(config, model, layout.place_of(RANK))
        if copied:
            for tensor in absorbed(model).values():
                # Strides stay, also those of a view with gaps.
                own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                tensor.data = own.copy_(tensor.data)
    weights = LayoutWeights.__new__(LayoutWeights)
    weights._strategy, weights._packed = strategy, False
    weights._runtimes = tuple(map(with_model, models.values()))
    weights._base = weights._runtimes[0]
    weights.finish_loading()
    assert not weights._packed
    places = [tensor.data_ptr() for model in models.values() for tensor in absorbed(model).values()]
    for name in (*names, *names[::-1]):
        strategy.arrange(base_layout)
        with in_place(base_layout.place_of(RANK), config.parallel_config):
            checkpoint = load_file(Path(configs[name].model_config.model) / "model.safetensors")
            base.load_weights(checkpoint.items())
        assert weights.refresh(base_layout)
        for layout in [*LAYOUTS, *rng.choices(LAYOUTS, k=5)]:
            strategy.arrange(layout)
            assert_same(models[layout], expected[name, layout])
    assert places == [
        tensor.data_ptr() for model in models.values() for tensor in absorbed(model).values()
    ], "compiled code would miss them"
    if not copied:
        storages = {weight.storage for weight in model_weights(base)}
        assert all(
            tensor.untyped_storage()._cdata in storages for tensor in absorbed(base).values()
        )

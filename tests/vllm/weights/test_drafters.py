"""Drafters' weights equal, bit for bit, what vLLM's own loaders give at each tp.

After walks over the layouts, and after updates of the target, the drafter, or both. The drafters
are loaded by vLLM's code for Model Runner V2, which has them share modules with the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from pat_vllm.executor.messages import Refreshed
from pat_vllm.layout import Layout
from pat_vllm.models.drafter_size import DrafterSize
from pat_vllm.models.layer_sizes import fields_of
from pat_vllm.models.model_size import ModelSize
from pat_vllm.start.prepare import drafter_of
from pat_vllm.start.setup import Setup
from pat_vllm.weights.drafter import Drafter
from pat_vllm.weights.model_weights import model_weights
from pat_vllm.worker.layout_config import layout_config
from pat_vllm.worker.layout_weights import LayoutWeights
from tests.support.models import random_model
from tests.vllm.weights.test_weights import (
    as_rank,
    assert_same_weights,
    no_accelerator,
    storages,
    vllm_config_for,
)

RANKS = 4
LAYOUTS = [Layout.of(tp, RANKS) for tp in (1, 2, 4)]
CASES: Mapping[str, tuple[str, str, str | None]] = {
    "MiMo": ("mtp", "mimo", None),
    "Nemotron-H": ("mtp", "nemotron_h_mtp", None),
    "EAGLE-3": ("eagle3", "repeating", "eagle3"),
    "EAGLE": ("eagle", "repeating", "eagle"),
    "draft model": ("draft_model", "qwen3", "qwen3"),
}
"""By name: the method, the target, and the drafter if it is a checkpoint of its own."""

__all__ = ["no_accelerator"]


class Case:
    """A target with its drafter, and both of another seed."""

    def __init__(self, name: str) -> None:
        self.method, target, drafter = CASES[name]
        self.paths = {
            updated: (
                random_model(target + updated),
                None if drafter is None else random_model(drafter + updated),
            )
            for updated in ("", "_updated")
        }

    def config(self, updated: str = "") -> VllmConfig:
        """Of an engine of `RANKS` ranks."""
        target, drafter = self.paths[updated]
        length = 1 if self.method == "mtp" else 2
        speculative = {"method": self.method, "num_speculative_tokens": length}
        if drafter is not None:
            speculative["model"] = str(drafter)
        return vllm_config_for(target, RANKS, speculative_config=speculative)

    def checkpoint(self, which: str) -> dict[str, torch.Tensor]:
        """The other weights of the target, or of the drafter."""
        target, drafter = self.paths["_updated"]
        path: Path = target if which == "target" or drafter is None else drafter
        return load_file(path / "model.safetensors")


class Models:
    """In place of a runtime: a layout's models, as its runner loads them."""

    def __init__(self, engine: VllmConfig, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.config = layout_config(engine, Setup.of(engine), layout, rank)
        self.runner = SimpleNamespace(
            get_model=lambda: self.target,
            get_draft_model=lambda: self.drafter,
            req_states=None,  # as Model Runner V2 has some
        )
        self._rank = layout.tp_rank_of(rank)

    def load(self) -> None:
        config: Any = self.config
        with as_rank(self.layout.tp, self._rank), set_current_vllm_config(config):
            self.target: Any = get_model(vllm_config=config)
            if config.speculative_config.uses_draft_model():
                speculator = SimpleNamespace(
                    vllm_config=config,
                    speculative_config=config.speculative_config,
                    draft_model_config=config.speculative_config.draft_model_config,
                )
                load_model: Any = StandaloneARSpeculator.load_draft_model
                self.drafter: Any = load_model(speculator, self.target, set())
            else:
                self.drafter = load_eagle_model(self.target, config)

    @property
    def own(self) -> nn.Module:
        return Drafter(self.drafter, self.target)


def loaded(engine: VllmConfig, layouts: list[Layout], rank: int, strategy: str) -> tuple[Any, Any]:
    """`LayoutWeights` of a rank, and its models by layout."""
    models = {layout: Models(engine, layout, rank) for layout in layouts}
    setup: Any = SimpleNamespace(weights=strategy, experts=None)
    weights = LayoutWeights(setup, models, rank)  # type: ignore[arg-type]
    for runtime in models.values():
        with weights.loading_into(runtime):  # type: ignore[arg-type]
            runtime.load()
    weights.finish_loading()
    return weights, models


def stock(engine: VllmConfig, rank: int) -> dict[Layout, Models]:
    """What vLLM loads for each layout, each from the checkpoint."""
    return {layout: loaded(engine, [layout], rank, "inplace")[1][layout] for layout in LAYOUTS}


def assert_same(models: Models, expected: Models) -> None:
    assert_same_weights(models.target, expected.target)
    assert_same_weights(models.own, expected.own)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_in_every_layout(name: str, rank: int) -> None:
    case = Case(name)
    before, after = stock(case.config(), rank), stock(case.config("_updated"), rank)
    weights, models = loaded(case.config(), LAYOUTS, rank, "inplace")
    one, two, four = LAYOUTS

    def walk(expected: Mapping[Layout, Models]) -> None:
        for layout in (four, two, one, two, four, one):
            weights.arrange(layout)
            assert_same(models[layout], expected[layout])

    walk(before)
    base = models[one]
    assert all(storages(of.own) == storages(base.own) for of in models.values())
    captured = weights._of_drafter._base.keys()
    assert captured == {weight.name for weight in model_weights(base.own)}, "what is replaced stays"
    for of in models.values():  # what the base layout's drafter shares with the target
        assert shared(of) == shared(base) == shared(before[one])

    with as_rank(1, 0):  # which Mamba2 asks for
        base.target.load_weights(case.checkpoint("target").items())
    if name == "MiMo":  # of a trainer that has no such module
        of_target = load_file(random_model("repeating_qwen2_updated") / "model.safetensors")
        base.drafter.load_weights(of_target.items())
    assert weights.refresh(one) is Refreshed.DONE and weights.drafter_is_stale
    for layout in LAYOUTS:
        weights.arrange(layout)
        assert_same_weights(models[layout].target, after[layout].target)
        assert_same_weights(models[layout].own, before[layout].own)
    weights.arrange(one)
    base.drafter.load_weights(case.checkpoint("drafter").items())
    assert weights.refresh(two) is Refreshed.DONE and not weights.drafter_is_stale
    walk(after)


@pytest.mark.parametrize("name", CASES)
def test_weights_take_what_is_computed(name: str) -> None:
    """But norms, biases and tables of ids."""
    case = Case(name)
    config = case.config()
    assert config.model_config is not None
    found = drafter_of(config.speculative_config)
    assert found is not None and found[0] == case.method
    target = ModelSize.of(fields_of(config.model_config.hf_text_config), dtype_bytes=4)
    size = DrafterSize.of(case.method, target, found[1])
    for layout, models in stock(config, rank=0).items():
        taken = sum(parameter.nbytes for parameter in models.own.parameters())
        assert taken == pytest.approx(size.weight_bytes(layout.tp), rel=0.03)


def shared(models: Models) -> set[str]:
    """Names in the drafter of modules that are the target's."""
    of_target = set(models.target.modules())
    every = models.drafter.named_modules(remove_duplicate=False)
    return {name for name, module in every if module in of_target}

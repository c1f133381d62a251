"""What mixtures of experts take, against vLLM: weights, workspaces, configs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from pat_vllm.layout import Experts
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.layer_sizes import ExpertSizes
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.moe_config import MoEConfig
from tests.support.models import random_model
from tests.vllm.weights.test_experts import KINDS, LAYOUTS, MODELS
from tests.vllm.weights.test_weights import build, vllm_config_for

QWEN3 = MODEL_SHAPES["qwen3-30b-a3b"]


@pytest.fixture(autouse=True)
def current_vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(random_model(name)) / "config.json").read_text())
    return config


def parameter_bytes(model: nn.Module) -> int:
    """Without biases. Of parameters that are in two modules, once."""
    sizes = {
        parameter.untyped_storage().data_ptr(): parameter.nbytes
        for name, parameter in model.named_parameters()
        if not name.endswith("bias")
    }
    return sum(sizes.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_that_vllm_makes(name: str, kind: Experts) -> None:
    """The most that a rank of a layout has, to 1%: norms are left out."""
    shape = ModelSize.of(config_of(name), dtype_bytes=4)
    vllm_config = vllm_config_for(random_model(name), tp=1)
    for layout in LAYOUTS:
        sizes = [
            parameter_bytes(build(vllm_config, layout.place_of(rank, kind)))
            for rank in layout.ranks_of(0)
        ]
        estimated = shape.weight_bytes(layout.tp, kind == "ep")
        assert max(sizes) == pytest.approx(estimated, rel=0.01), layout


def test_a_workspace_is_what_vllms_experts_ask_for() -> None:
    """Of one layer's shapes in every layout: the two buffers, of which one becomes the output."""
    experts = TritonExperts.__new__(TritonExperts)
    for intermediate, tp, spread in product((768, 4096), (1, 2, 4, 8), (False, True)):
        model = ModelSize.of({**QWEN3, "moe_intermediate_size": intermediate})
        width = intermediate if spread else intermediate // tp
        sizes = (8192, 2 * width, model.hidden, 8, 128, 128)
        shapes = experts.workspace_shapes(*sizes, None, MoEActivation.SILU)
        first, second, output = map(math.prod, shapes)
        expected = 2 * (max(first, output) + second)
        assert model.expert_workspace_bytes(tp, spread, 8192) == expected


def test_experts_of_the_configs_that_transformers_writes() -> None:
    expected = {name: ExpertSizes(8, 2, 64, 0, False, layers=2) for name in MODELS}
    expected["qwen2_moe"] = ExpertSizes(6, 2, 64, 256, True, layers=2)
    expected["glm4_moe"] = ExpertSizes(8, 2, 64, 64, False, layers=1)
    expected["deepseek_v2"] = ExpertSizes(8, 2, 64, 2 * 64, False, layers=1)
    expected["deepseek_v3"] = ExpertSizes(8, 2, 64, 64, False, layers=2)
    expected["gpt_oss"] = ExpertSizes(8, 2, 128, 0, False, layers=2)
    expected["qwen3_next"] = ExpertSizes(8, 2, 64, 256, True, layers=6)
    for name, sizes in expected.items():
        size = ModelSize.of(config_of(name))
        assert size.experts == sizes, name
        assert size.dense_layers == (name in ("deepseek_v2", "deepseek_v3", "glm4_moe"))
        assert MoEConfig.from_config(config_of(name)) == MoEConfig(sizes.count, sizes.intermediate)

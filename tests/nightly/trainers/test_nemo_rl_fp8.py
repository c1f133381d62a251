"""NeMo-RL's `precision=fp8`: what its code quantizes and loads reaches every layout.

NeMo-RL gives vLLM the config of a checkpoint with scales for blocks, and patches how vLLM processes
such weights: in its Ray executor, in whose place PAT's comes. So a user's worker extension does it.
Of vLLM 0.32 the patch for experts asks for an argument that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests.nightly.trainers import need
from tests.support import fp8_on_cpu
from tests.support.models import random_model
from tests.vllm.weights.test_fp8 import CPU, check_pushes
from tests.vllm.weights.test_weights import vllm_config_for

need("nemo_rl")
Extension: Any = import_module("tests.nightly.trainers.nemo_rl_on_cpu").Extension
fp8, fp8_train_utils = (
    import_module(f"nemo_rl.models.generation.vllm.quantization.{name}")
    for name in ("fp8", "fp8_train_utils")
)


@pytest.fixture
def quantizing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What NeMo-RL's code needs of a process, but for its patches of vLLM."""
    fp8_on_cpu.apply(monkeypatch)
    monkeypatch.setattr(fp8, "global_fp8_config", fp8.FP8Config(model_parallel_size=2))
    monkeypatch.setattr(fp8, "fp8_state", fp8.FP8State())
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def patched(quantizing: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NeMo-RL's patches."""
    monkeypatch.setattr(fp8, "fp8_patches_applied", False)
    fp8.apply_fp8_patches(None, fp8.global_fp8_config)
    yield
    for patch in fp8.fp8_state.vllm_patches:
        patch.stop()


def config_of(name: str, **options: Any) -> VllmConfig:
    """What NeMo-RL starts vLLM with, for a model in 16 bits."""
    return vllm_config_for(
        random_model(name),
        tp=1,
        dtype="bfloat16",
        load_format="dummy",
        quantization="fp8",
        hf_overrides={"quantization_config": dict(fp8.FP8_BLOCK_QUANT_KWARGS)},
        **options,
    )


def scales_of(config: VllmConfig, name: str) -> dict[str, float]:
    """Of KV, as a calibration gives."""
    first = 0.25 if name.endswith("_updated") else 0.5
    return fp8_train_utils.convert_calibration_to_vllm_format(
        {
            f"layer_{layer}": {"q_scale": 1.0, "k_scale": first + layer, "v_scale": 2 * first}
            for layer in range(config.model_config.hf_config.num_hidden_layers)
        }
    )


def push(model: nn.Module, config: VllmConfig, name: str) -> None:
    """As `update_weights_via_ipc_zmq` does with what comes, in two batches."""
    extension = object.__new__(Extension)
    extension.model_runner = SimpleNamespace(
        model=model, vllm_config=config, model_config=config.model_config
    )
    extension.model_config, extension.device = config.model_config, CPU
    weights = [*load_file(random_model(name) / "model.safetensors").items()]
    if config.cache_config.cache_dtype == "fp8":
        weights += [(scale, torch.tensor(v)) for scale, v in scales_of(config, name).items()]
    with extension._weight_update_lifecycle("ipc") as finalize:
        for batch in (weights[: len(weights) // 2], weights[len(weights) // 2 :]):
            extension._load_weights(batch)
        finalize()


def push_in_a_reload(model: nn.Module, config: VllmConfig, name: str) -> None:
    """The same into vLLM's own reload by layers."""
    weights = load_file(random_model(name) / "model.safetensors").items()
    initialize_layerwise_reload(model)
    fp8.load_weights(weights, SimpleNamespace(model=model))
    finalize_layerwise_reload(model, config.model_config)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("base_tp", [1, 2])
def test_with_its_patches(base_tp: int) -> None:
    check_pushes("fp8", config_of("fp8"), base_tp, push)


@pytest.mark.usefixtures("quantizing")
@pytest.mark.parametrize(("name", "base_tp"), [("fp8", 2), ("fp8_moe", 1)])
def test_without_its_patches(name: str, base_tp: int) -> None:
    """Parameters fit no weights, so that PAT opens a reload."""
    check_pushes(name, config_of(name), base_tp, push, push_in_a_reload)


@pytest.mark.usefixtures("patched")
def test_scales_of_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which NeMo-RL sends with the weights, keeps as parameters, and processes again.

    Its patch reads an attribute that vLLM 0.32 does not have.
    """
    monkeypatch.setattr(Attention, "calculate_kv_scales", False, raising=False)
    config = config_of("fp8", kv_cache_dtype="fp8")
    check_pushes("fp8", config, 1, push)

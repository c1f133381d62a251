"""verl's `rollout.quantization=fp8`: weights that its workers quantize when they come.

verl gives vLLM the config of a checkpoint with scales for blocks, patches how vLLM processes such
weights, and loads what it has quantized.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")

from safetensors.torch import load_file
from torch import nn
from verl.utils.kernel import fp8_kernel
from verl.utils.vllm import vllm_quant_utils as quantizing
from vllm.config import VllmConfig, set_current_vllm_config

from tests.support import fp8_on_cpu
from tests.support.models import random_model
from tests.verl.models import BLOCKS, few_tokens, quantized_in_full
from tests.verl.reference import CLOSE, Reference
from tests.verl.servers import server
from tests.verl.test_classes import IN_PLACE
from tests.verl.test_server import PROMPTS, in_layout, regrouped
from tests.vllm.weights.test_fp8 import check_pushes
from tests.vllm.weights.test_weights import vllm_config_for


@pytest.fixture
def verls_patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What verl does in a worker's process. Its kernel in Triton has torch in its place."""
    fp8_on_cpu.apply(monkeypatch)
    monkeypatch.setattr(fp8_kernel, "_DISABLE_TRITON_FP8", True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    quantizing.apply_vllm_quant_patches()
    with set_current_vllm_config(VllmConfig()):
        yield
    while quantizing.fp8_state.vllm_patches:
        quantizing.fp8_state.vllm_patches.pop().stop()


def config_of(model: Path) -> VllmConfig:
    """What verl's server starts vLLM with, for a model in 16 bits."""
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    by_blocks = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "ignored_layers": [f"model.layers.{layer}.mlp.gate" for layer in range(layers)],
    }
    return vllm_config_for(
        model,
        tp=1,
        dtype="bfloat16",
        load_format="dummy",
        quantization="fp8",
        hf_overrides={"quantization_config": by_blocks},
    )


def push(model: nn.Module, config: VllmConfig, name: str) -> None:
    """As `update_weights_from_ipc` does with what comes, in two buckets."""
    runner = SimpleNamespace(model=model, vllm_config=config)
    weights = [*load_file(random_model(name) / "model.safetensors").items()]
    state = quantizing.prepare_quanted_weights_for_loading(model)
    for bucket in (weights[: len(weights) // 2], weights[len(weights) // 2 :]):
        quantizing.load_quanted_weights(bucket, runner)
    quantizing.process_quanted_weights_after_loading(model, state)


@pytest.mark.usefixtures("verls_patches")
@pytest.mark.parametrize(
    ("name", "base_tp"), [("fp8", 1), ("fp8_biased", 2), ("fp8_moe", 1), ("fp8_latent", 2)]
)
def test_pushed_weights_reach_every_layout(name: str, base_tp: int) -> None:
    check_pushes(name, config_of(random_model(name)), base_tp, push)


def test_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a switch in it, after pushes in either layout; in sleep, all weights are lost.

    It is compared with transformers, which has the quantized weights in 32 bits, as the kernel in
    the place of GPUs' does.
    """
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_on_cpu,verl_fp8_on_cpu")
    models = [few_tokens("qwen3", seed, **BLOCKS) for seed in range(2)]
    with server(models[0], *IN_PLACE, quantization="fp8", load_format="dummy") as pat:
        for step, tp in enumerate((1, 2)):
            assert pat.call("pat_switch", tp)
            if step:
                pat.do(pat.replica.release_kv_cache())
            pat.do(pat.push(models[step], step))
            if step:
                pat.do(pat.replica.resume_kv_cache())
            expected = Reference(quantized_in_full(models[step]))
            for layout in (1, 2):
                responses = in_layout(pat, layout)
                expected.check(responses, PROMPTS)
            expected.check(regrouped(pat), PROMPTS)
            in_full = Reference(models[step]).errors(PROMPTS[0], responses[0])
            assert max(in_full) > 100 * CLOSE, "they are quantized"

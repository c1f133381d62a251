"""vLLM's layers are built under some configuration, and run plain weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn as gdn
from vllm.config import VllmConfig, set_current_vllm_config

from tests.support.plain_weights.plain_weights import run_linear_attention_plain


@pytest.fixture(autouse=True)
def current_vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture(autouse=True)
def plain_linear_attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With vLLM's own kernels, weights in place are refused. Returns what they are called by."""
    attention: Any = gdn.QwenGatedDeltaNetAttention
    stock = attention.forward_cpu
    monkeypatch.setattr(attention, "forward_cpu", stock)  # to be restored
    run_linear_attention_plain(gdn)
    return stock


@pytest.fixture
def stock_linear_attention(plain_linear_attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn.QwenGatedDeltaNetAttention, "forward_cpu", plain_linear_attention)

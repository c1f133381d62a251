"""vLLM's layers are built under some configuration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.config import VllmConfig, set_current_vllm_config


@pytest.fixture(autouse=True)
def current_vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield

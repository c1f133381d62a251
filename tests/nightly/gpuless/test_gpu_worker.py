"""A GPU worker's life in more orders of what vLLM allows."""

from __future__ import annotations

import pytest

from tests.gpuless.device_memory import DeviceMemory
from tests.gpuless.gpu_engine import Engine
from tests.gpuless.test_gpu_worker import SEEDS, any_order, device, engine, needs

__all__ = ["device", "engine", "needs"]


@pytest.mark.parametrize("seed", range(len(SEEDS), 8))
def test_any_order(device: DeviceMemory, engine: Engine, seed: int) -> None:
    any_order(device, engine, seed)

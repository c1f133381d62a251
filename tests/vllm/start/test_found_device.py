"""What is asked of a driver, which is imitated: the device's memory, name, link and bandwidth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm.platforms
import vllm.utils.import_utils as import_utils
from vllm.platforms.interface import DeviceCapability

from pat_vllm.modelled.gpus import GPUS, MiB, known_gpu
from pat_vllm.start.found_device import found_device

KEPT = 480 * MiB


class Nvml:
    """Of an H100 (SXM)."""

    nvmlMemory_v2, NVML_CLOCK_MEM = 2, 2
    inits = 0

    def nvmlInit(self) -> None:
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.inits -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert index == 4, "the first that is visible"
        return index

    def nvmlDeviceGetMemoryInfo(self, gpu: int, version: int) -> Any:
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(reserved=KEPT)

    def nvmlDeviceGetMaxClockInfo(self, gpu: int, clock: int) -> int:
        return 2619

    def nvmlDeviceGetMemoryBusWidth(self, gpu: int) -> int:
        return 5120


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = SimpleNamespace(
        get_device_total_memory=lambda index: 81559 * MiB,
        is_cpu=lambda: False,
        get_device_capability=lambda index: DeviceCapability(9, 0),
        get_device_name=lambda index: "NVIDIA H100 80GB HBM3",
        device_id_to_physical_device_id=[4, 5, 6, 7].__getitem__,
        is_fully_connected=lambda physical: physical == [4, 5, 6, 7],
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", fake)
    return fake


def test_what_a_driver_says(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(import_utils, "import_pynvml", lambda: nvml)
    device = found_device(4)
    assert device is not None and nvml.inits == 0
    assert device.memory == 81559 * MiB - KEPT and device.link == "nvlink"
    gpu = known_gpu(device)
    assert gpu is not None and gpu.source == GPUS["H100"].source
    assert device.bandwidth == pytest.approx(GPUS["H100"].bandwidth, rel=0.01)
    platform.is_fully_connected = lambda physical: False
    pcie = found_device(2)
    assert pcie is not None and pcie.link == "pcie"


def test_what_a_driver_does_not_say(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than GPUs here; no NVML; nothing at all."""
    monkeypatch.setattr(import_utils, "import_pynvml", lambda: None)
    device = found_device(8)
    assert device is not None and (device.link, device.bandwidth) == (None, 0.0)
    assert device.memory == 81559 * MiB
    platform.get_device_total_memory = lambda index: 1 // 0
    assert found_device(4) is None


def test_a_rank_on_cpu_has_its_part_of_the_memory(platform: Any) -> None:
    platform.is_cpu = lambda: True
    device = found_device(4)
    assert device is not None and device.memory == 81559 * MiB // 4 and known_gpu(device) is None

"""What the doctor says of a machine: of this one, and of one with GPUs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform

from pat_vllm.doctor import machine
from pat_vllm.doctor.machine import machine_checks
from pat_vllm.doctor.report import Unfit
from pat_vllm.modelled.gpus import Device, GiB


def test_this_machine() -> None:
    checks = dict(machine_checks(1))
    assert [*checks] == ["versions", "host"]
    assert f"torch {torch.__version__}" in str(checks["versions"]())
    assert "free" in str(checks["host"]())


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=1 << 30, total=24 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(Unfit, match=r"2 ranks on CPU need about 2\.3 GiB"):
        machine.host(2)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of which is half full, and does not reach the other."""
    answers = {
        "device_count": lambda: 2,
        "mem_get_info": lambda at: ((40 + 39 * at) * GiB, 80 * GiB),
        "get_device_capability": lambda at: (9, 0),
        "get_device_name": lambda at: "H100",
        "can_device_access_peer": lambda a, b: a > b,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(current_platform, "device_count", lambda: 2, raising=False)
    monkeypatch.setattr(machine, "on_cpu", lambda: False)


def test_gpus_for_ranks(two_gpus: None) -> None:
    assert [name for name, _ in machine_checks(2)] == ["versions", "host", "GPUs", "links"]
    assert machine.gpus(2) == "2 x H100 (80.0 GiB, 9.0); GPU 0: 40.0 GiB free"
    with pytest.raises(Unfit, match="--ranks 4 needs as many GPUs, 2 are here"):
        machine.gpus(4)


def test_a_link_must_work_both_ways(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.links(2).startswith("no peer access between 0-1")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    device = Device(80 * GiB, link="pcie")
    monkeypatch.setattr("pat_vllm.start.found_device.found_device", lambda ranks: device)
    assert machine.links(2) == "every GPU reaches every other's memory, over PCIe"


def test_a_vllm_that_cannot_be_imported_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(Unfit, match=r"vLLM cannot be imported .*: pip uninstall torchvision"):
        machine.versions()

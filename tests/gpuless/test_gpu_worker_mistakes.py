"""Mistakes in the GPU worker, each of which a check of its life on an imitated device sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pat_vllm.kv_transfer.kv_buffer import _Allocation
from pat_vllm.worker.gpu_worker import PATGPUWorker
from pat_vllm.worker.runtime import share_buffers, shut_down_beside
from pat_vllm.worker.worker import PATWorkerMixin
from tests.gpuless.device_memory import DeviceMemory
from tests.gpuless.gpu_engine import Engine, imitate_gpus, start_worker
from tests.gpuless.test_gpu_worker import (
    TAGS,
    Start,
    check_parameters,
    check_release,
    check_shared,
    check_shutdown,
    check_sleep,
    check_start,
    check_walk,
)
from tests.support.mutation import mutated


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMemory]:
    with DeviceMemory(monkeypatch) as device:
        yield device


@pytest.fixture
def start(device: DeviceMemory, monkeypatch: pytest.MonkeyPatch) -> Start:
    imitate_gpus(monkeypatch, device)
    return lambda: Engine(start_worker())


MISTAKES: dict[str, tuple[str, Any, dict[str, str]]] = {
    "freed shares stay": (
        "shared",
        PATGPUWorker.load_model,
        {"if len(self._runtimes) > 1 and": "if False and"},
    ),
    "nothing is shared": (
        "shared",
        PATWorkerMixin.load_model,
        {"share_buffers([*self._runtimes.values()][:count], self._handover)": "pass"},
    ),
    "the smallest is shared": (
        "shared",
        share_buffers,
        {"host, *others = largest_first(runtimes)": "*others, host = largest_first(runtimes)"},
    ),
    "one runner is shut down": (
        "shutdown",
        shut_down_beside,
        {"runtime.runner.shutdown()": "pass"},
    ),
    "shared KV outlives its pool": (
        "shutdown",
        PATWorkerMixin.shutdown,
        {"del self._weights, self._buffer": "pass"},
    ),
    "views of KV outlive its pool": (
        "shutdown",
        shut_down_beside,
        {"runtime.connector = None": "pass"},
    ),
    "derived weights enter a pool of their own": (
        "start",
        PATGPUWorker._maybe_get_memory_pool_context,
        {"self._active is not self._base": "False"},
    ),
    "a KV buffer for each layout": (
        "start",
        _Allocation.__torch_function__,
        {"if self._shared.buffer is None": "if True"},
    ),
    "not at home": (
        "start",
        PATWorkerMixin.compile_or_warm_up_model,
        {"self._enter_for_a_call(home)": "pass"},
    ),
    "weights go to sleep as they lie": (
        "walk",
        PATWorkerMixin.sleep,
        {"self._weights.arrange(self._base.layout)": "pass"},
    ),
    "buffers are kept at the wrong level": (
        "sleep",
        PATGPUWorker.sleep,
        {"if level == 2": "if level == 1"},
    ),
    "buffers come back with everything only": (
        "sleep",
        PATGPUWorker.wake_up,
        {'if tags is None or "weights" in tags': "if tags is None"},
    ),
    "the active layout's parameters are kept": (
        "parameters",
        PATGPUWorker._in_base,
        {"self._activate(self._base)": "pass"},
    ),
    "sleep ends in the base layout": (
        "walk",
        PATGPUWorker._in_base,
        {"self._activate(active)": "pass"},
    ),
    "an update finds another layout": (
        "walk",
        PATWorkerMixin.pat_call_in_base,
        {"self._enter_for_a_call(self._base)": "pass"},
    ),
    "a switch leaves weights as they are": (
        "start",
        PATWorkerMixin.pat_switch,
        {"self._weights.arrange(target.layout)": "0"},
    ),
}
"""Which check sees it, and where it is made."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(
    device: DeviceMemory, start: Start, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    check, function, changes = MISTAKES[mistake]
    checks: dict[str, Callable[[], None]] = {
        "start": lambda: check_start(device, start),
        "shared": lambda: check_shared(device, start),
        "sleep": lambda: check_sleep(device, start, 2, TAGS[1]),
        "parameters": lambda: check_parameters(start, monkeypatch),
        "walk": lambda: check_walk(device, start, seed=0),
        "shutdown": lambda: check_shutdown(device, start, monkeypatch, 0),
    }
    with mutated(function, changes), pytest.raises(AssertionError):
        checks[check]()


def test_a_warm_up_by_the_engines_limits_is_seen(
    device: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's worker has them in an attribute of its own."""
    imitate_gpus(monkeypatch, device, "v1")
    changes = {"self.scheduler_config = runtime.config.scheduler_config": "pass"}
    with mutated(PATWorkerMixin._activate, changes), pytest.raises(AssertionError, match="a step"):
        start_worker()


def test_a_worker_that_knows_of_no_sleep_is_seen(
    device: DeviceMemory, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(PATGPUWorker, "_sleeping_buffers")
    with pytest.raises(AttributeError):
        check_release(device, start)

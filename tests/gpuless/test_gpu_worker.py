"""The GPU worker's life on an imitated device: load, KV cache, sleep, discard, wake up."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.v1.worker.gpu_worker import Worker

from pat_vllm.kv_transfer.kv_buffer import SharedKVBuffer
from pat_vllm.layout import Layout
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.gpu_worker import PATGPUWorker
from pat_vllm.worker.handover import V2Handover
from tests.gpuless.device_memory import DeviceMemory

LAYOUTS = tuple(Layout.of(tp, 4) for tp in (1, 2, 4))
COUNTERS = 1 << 16
KV_BYTES = 4096


class Runner:
    """Of a model runner what the worker uses; it takes memory as vLLM's does."""

    def __init__(self, layout: Layout) -> None:
        self.tp = layout.tp
        self.model_memory_usage = 0
        self.req_states = SimpleNamespace(req_id_to_index={})

    def load_model(self, load_dummy_weights: bool = False) -> None:
        self.model: Any = nn.Linear(8 // self.tp, 8, bias=False)
        self.model.requires_grad_(False)
        self.model.weight.fill_(self.tp)
        self.model.register_buffer("cache", torch.zeros(16).fill_(10.0 + self.tp))
        counters = torch.zeros(COUNTERS, dtype=torch.int32)
        state = SimpleNamespace(output_bin_counts=counters, prompt_bin_mask=counters[:1])
        self.sampler = SimpleNamespace(penalties_state=state)

    def get_model(self) -> nn.Module:
        return self.model


class Weights:
    """In place of `LayoutWeights`, where rows would be put in order."""

    def __init__(self) -> None:
        self.arranged: list[int] = []

    def arrange(self, layout: Layout) -> int:
        self.arranged.append(layout.tp)
        return 0

    def finish_loading(self) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceMemory:
    return DeviceMemory(monkeypatch)


@pytest.fixture
def worker(device: DeviceMemory, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(worker_module, "install_tp_group", lambda group: None)
    monkeypatch.setattr(worker_module.current_platform, "update_block_size_for_backend", id)
    made: Any = PATGPUWorker.__new__(PATGPUWorker)
    model_config = SimpleNamespace(
        enable_cumem_allocator=True,
        enable_nccl_comm_suspend=False,
        sleep_mode_backend="cumem",
        sleep_preserve_parameter_names=None,
    )
    made.model_config = model_config
    made.device = torch.device("cpu")
    made._sleep_mode_backend = None
    made._sleep_saved_buffers = {}
    made._sleep_saved_parameters = {}
    made._sleep_saved_draft_buffers = {}
    made.get_draft_model = lambda: None
    made.weight_transfer_engine = None
    made._weights = Weights()
    made._handover = V2Handover()
    made._runtimes = {}
    for layout in LAYOUTS:
        config: Any = SimpleNamespace(
            model_config=model_config,
            weight_transfer_config=None,
            parallel_config=None,
            cache_config=None,
            compilation_config=None,
            load_config=None,
        )
        made._runtimes[layout] = SimpleNamespace(
            layout=layout, config=config, group=None, runner=Runner(layout)
        )
    made._base = made._runtimes[LAYOUTS[0]]
    made._activate(made._base)
    module = "vllm.v1.worker.gpu_worker"
    monkeypatch.setattr(f"{module}.has_ec_transfer", lambda: False)
    monkeypatch.setattr(f"{module}.set_torch_threads_for_runtime", lambda: None)
    monkeypatch.setattr(f"{module}.set_current_vllm_config", lambda config: nullcontext())
    made.load_model()
    made._buffer = SharedKVBuffer()
    for _ in LAYOUTS:
        with made._maybe_get_memory_pool_context("kv_cache"):
            made.kv = torch.zeros(KV_BYTES, dtype=torch.int8)
    return made


def whole(worker: Any, what: str) -> bool:
    """Whether each layout's weights, or buffers, are as they were loaded."""
    models = {layout.tp: one.runner.model for layout, one in worker._runtimes.items()}
    if what == "weights":
        return all(bool((model.weight == tp).all()) for tp, model in models.items())
    return all(bool((model.cache == 10.0 + tp).all()) for tp, model in models.items())


def test_the_device_forgets_what_is_not_mapped(device: DeviceMemory, worker: Any) -> None:
    """Without that, the tests below could not fail."""
    assert whole(worker, "weights") and whole(worker, "buffers")
    worker.sleep_mode_backend.suspend(level=2)
    worker.sleep_mode_backend.resume()
    assert not whole(worker, "weights") and not whole(worker, "buffers")


def test_what_layouts_share_is_there_once(device: DeviceMemory, worker: Any) -> None:
    """No pool of the derived layouts keeps what was freed when they took the base layout's."""
    models = [one.runner.model for one in worker._runtimes.values()]
    needed = sum(t.nbytes for model in models for t in model.state_dict().values())
    assert device.used("weights") == needed + 4 * COUNTERS
    worker.sleep(level=1)
    backed = [data.cpu_backup_tensor for data in device.allocator.pointer_to_data.values()]
    assert sum(one.nbytes for one in backed if one is not None) == needed + 4 * COUNTERS


def test_kv_memory_is_released_and_comes_back(device: DeviceMemory, worker: Any) -> None:
    """As vLLM's engine core does for `release_kv_cache_memory`, before any sleep."""
    assert device.used("kv_cache") == KV_BYTES, "one buffer for all layouts"
    worker.discard(("kv_cache",))
    assert device.used("kv_cache") == 0
    worker.wake_up(None)
    assert device.used("kv_cache") == KV_BYTES
    assert whole(worker, "weights") and whole(worker, "buffers")


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "tags",
    [[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]],
    ids=["at once", "weights first", "KV first"],
)
@pytest.mark.parametrize("times", [1, 2])
def test_sleep_and_wake_up(
    device: DeviceMemory, worker: Any, level: int, tags: list[Any], times: int
) -> None:
    for _ in range(times):
        used = device.used("weights")
        worker._weights.arranged.clear()
        worker.sleep(level)
        assert worker._weights.arranged == [1], "rows lie as the base layout has them"
        assert device.used("weights") == device.used("kv_cache") == 0
        for some in tags:
            worker.wake_up(some)
            if some == ["kv_cache"]:
                assert device.used("kv_cache") == KV_BYTES
        assert device.used("weights") == used and device.used("kv_cache") == KV_BYTES
        assert whole(worker, "buffers")
        assert whole(worker, "weights") == (level == 1)
        for layout, runtime in worker._runtimes.items():
            runtime.runner.model.weight.fill_(layout.tp)  # an update


def test_buffers_come_back_with_the_weights_only(device: DeviceMemory, worker: Any) -> None:
    worker.sleep(2)
    worker.wake_up(["kv_cache"])
    assert not whole(worker, "buffers")
    worker.discard(("kv_cache",))
    worker.wake_up(["weights"])
    assert whole(worker, "buffers")
    assert device.used("kv_cache") == 0
    worker.wake_up(["kv_cache"])
    assert whole(worker, "buffers")


def test_parameters_that_survive_a_sleep_are_the_base_layout_s(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other layouts' are derived from them, whichever layout is active."""
    seen: list[Any] = []

    def save(self: Any, model: Any) -> None:
        seen.append(model)
        self._sleep_saved_parameters = {"weight": model.weight.clone()}

    def restore(self: Any, model: Any) -> None:
        seen.append(model)
        self._sleep_saved_parameters = {}

    monkeypatch.setattr(Worker, "_save_sleep_parameters", save)
    monkeypatch.setattr(Worker, "_restore_sleep_parameters", restore)
    active = worker._runtimes[LAYOUTS[1]]
    worker._activate(active)
    worker.sleep(2)
    worker.wake_up(None)
    assert seen == [worker._base.runner.model] * 2
    assert worker._active is active and worker.model_runner is active.runner

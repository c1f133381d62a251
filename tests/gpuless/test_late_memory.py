"""What layouts take beside steps and weights is measured as they will take it, and kept free once.

`profile_cudagraph_memory` and what it calls are vLLM's, of Model Runner V2, on an imitated device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.core import kv_cache_utils
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import AttentionGroup

from pat_vllm.layout import Layout
from pat_vllm.patches import runners
from pat_vllm.worker import gpu_worker, late_memory
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.cpu_worker import PATCPUWorker
from pat_vllm.worker.gpu_worker import PATGPUWorker
from tests.gpuless.graph_pools import SEGMENT, Allocation, Device, MiB

GiB = 1 << 30
LAYOUTS = tuple(Layout.of(tp, 8) for tp in (1, 2, 4, 8))
KV_HEADS, NUM_LAYERS = 8, 32
STAGED = (1 + 1 / 16) / NUM_LAYERS
"""Share of the KV cache: a layer that is sent, and a round of one in both directions."""

GRAPHS = 10
OF_GRAPH = 2 * MiB
COMPUTED_WITH = {1: 600 * MiB, 2: 400 * MiB, 4: 700 * MiB, 8: 100 * MiB}
"""Memory that graphs of one pool have in common, by tp."""
TABLES = {1: 8 * MiB, 2: 9 * MiB, 4: 10 * MiB, 8: 11 * MiB}
WORKSPACE = {1: 1024 * MiB, 2: 512 * MiB, 4: 394 * MiB, 8: 394 * MiB}
ACTIVATIONS = {1: 1400 * MiB, 2: 1500 * MiB, 4: 1300 * MiB, 8: 1200 * MiB}
KEPT = {1: 40 * MiB, 2: 30 * MiB, 4: 20 * MiB, 8: 10 * MiB}
"""What the first step leaves."""
SMALLEST_KV = 300 * MiB


class Builder:
    """Of FlashInfer's metadata builder what has to do with its workspace."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._make = lambda: device.take(num_bytes)
        self._workspace: Allocation | None = None

    def _get_workspace_buffer(self) -> Allocation:
        if self._workspace is None:
            self._workspace = self._make()
        return self._workspace

    def set_workspace_buffer(self, workspace: Allocation) -> None:
        self._workspace = workspace


class Runner:
    """A Model Runner V2 that takes memory as vLLM's does."""

    max_num_reqs = 256
    lora_config = None
    req_states = None

    def __init__(self, device: Device, tp: int) -> None:
        self.device = device
        self.tp = tp
        self.vllm_config: Any = None
        self.cache_config = SimpleNamespace(num_gpu_blocks_override=None, num_gpu_blocks=None)
        self.compilation_config = SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL,
            max_cudagraph_capture_size=512,
            static_forward_context={},
        )
        self.model_state = SimpleNamespace(supports_mm_inputs=False)
        self.graphs: list[Any] = []
        self.kept: Allocation | None = None

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return dict.fromkeys(f"layers.{i}" for i in range(NUM_LAYERS))

    def initialize_kv_cache(self, config: Any, is_profiling: bool = False) -> None:
        self.kv_cache_config = config
        self.tables = self.device.take(TABLES[self.tp])
        group: Any = SimpleNamespace(device=self.device, tp=self.tp, metadata_builders=[])
        AttentionGroup.create_metadata_builders(group)
        for builder in group.metadata_builders:
            builder._get_workspace_buffer()
        self.attn_groups = [[group]]
        self.cudagraph_manager: Any = SimpleNamespace(
            needs_capture=lambda: True,
            use_breakable_cg=False,
            pool=None,
            _capture_descs={CUDAGraphMode.FULL: range(GRAPHS)},
        )
        if is_profiling:
            self.kv_caches = [self.device.take(SMALLEST_KV)]

    def profile_cudagraph_memory(self) -> int:
        return cudagraph_utils.profile_cudagraph_memory(self)  # type: ignore[arg-type]

    def capture_model(self, profile_only: bool = False) -> int:
        manager = self.cudagraph_manager
        start = self.device.free
        manager.graphs = []
        for _ in range(manager._max_full_descs_to_capture if profile_only else GRAPHS):
            before = self.device.free
            graph = self.device.graph(manager.pool, COMPUTED_WITH[self.tp], OF_GRAPH)
            manager.graphs.append(graph)
            if profile_only:
                manager._capture_mem_samples.append(before - self.device.free)
        return start - self.device.free

    def maybe_remove_all_loras(self, config: None) -> None:
        pass


def create_builders(group: Any) -> None:
    """`AttentionGroup.create_metadata_builders` for FlashInfer."""
    group.metadata_builders = [Builder(group.device, WORKSPACE[group.tp])]


class Platform:
    """CUDA, as far as pools of graphs go."""

    _global_graph_pool = None

    def graph_pool_handle(self) -> Any:
        return torch.cuda.graph_pool_handle()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(monkeypatch, 80 * GiB)
    monkeypatch.setattr(AttentionGroup, "create_metadata_builders", create_builders)
    monkeypatch.setattr(cudagraph_utils, "current_platform", Platform())
    monkeypatch.setattr(kv_cache_utils, "get_kv_cache_groups", lambda config, spec: spec)
    monkeypatch.setattr(
        kv_cache_utils,
        "get_kv_cache_config_from_groups",
        lambda *args, **options: SimpleNamespace(num_blocks=256),
    )
    for module in (cudagraph_utils, late_memory):
        monkeypatch.setattr(module, "set_current_vllm_config", lambda config: nullcontext())
    return made


def runtimes_on(device: Device) -> list[Any]:
    made = []
    for layout in LAYOUTS:
        runner = Runner(device, layout.tp)
        config = SimpleNamespace(
            compilation_config=runner.compilation_config,
            model_config=SimpleNamespace(get_total_num_kv_heads=lambda: KV_HEADS),
            additional_config={},
        )
        runtime: Any = SimpleNamespace(layout=layout, runner=runner, config=config)
        runtime.check_kv_cache = lambda config: None
        runtime.register_kv = lambda config, buffer: None
        made.append(runtime)
    return made


# -------------------------------------------------------------------- graphs


def test_graphs_are_measured_in_the_pool_that_they_share(device: Device) -> None:
    """They come to what they take when they are captured for good, in one pool."""
    runtimes = runtimes_on(device)
    before = device.free
    measured = late_memory.measure_graphs(runtimes, lambda runtime: None, None)
    assert device.free == before - sum(TABLES.values()), "all but what vLLM keeps is given back"
    new = torch.cuda.graph_pool_handle
    assert new() != new(), "whoever asks for a pool gets one of its own again"

    for runtime in runtimes:
        runtime.runner.initialize_kv_cache(None)
    pool, before = (0, 1 << 20), device.free
    for runtime in runtimes:
        runtime.runner.cudagraph_manager.pool = pool
        runtime.runner.capture_model()
    assert abs(sum(measured) - (before - device.free)) <= SEGMENT
    assert before - device.free == 4 * GRAPHS * OF_GRAPH + max(COMPUTED_WITH.values())


def test_without_graphs_none_are_measured(device: Device) -> None:
    runtimes = runtimes_on(device)
    for runtime in runtimes:
        runtime.config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    assert late_memory.measure_graphs(runtimes, lambda runtime: None, None) == [0] * 4


# -------------------------------------------------------------------- buffers


def test_buffers_that_come_with_a_kv_cache_are_measured(device: Device) -> None:
    """They come to what layouts keep, and the workspace of attention is there once."""
    runtimes = runtimes_on(device)
    before = device.free
    entered: list[Any] = []
    measured, workspace = late_memory.measure_buffers(runtimes, entered.append)
    assert entered == 2 * runtimes, "a layout is active when its buffers are made, and given back"
    tables = sum(TABLES.values())
    assert device.free == before - tables - WORKSPACE[1], "KV caches are given back"
    assert measured == [TABLES[1] + WORKSPACE[1], TABLES[2], TABLES[4], TABLES[8]]
    assert workspace is not None
    del workspace
    assert device.free == before - tables


# -------------------------------------------------------------------- the KV cache


REQUESTED = 70 * GiB


@pytest.fixture
def worker(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A worker on the imitated device, whose weights are loaded."""
    weights = device.take(16 * GiB)

    def determine(worker: Any) -> int:
        """As vLLM's worker does it for the active layout."""
        runner = worker.model_runner
        if worker.cache_config.kv_cache_memory_bytes:
            return int(worker.cache_config.kv_cache_memory_bytes)
        runner.kept = runner.kept or device.take(KEPT[runner.tp])
        free = device.free
        worker.cudagraph_memory_estimate = runner.profile_cudagraph_memory()
        graphs = worker.cudagraph_memory_estimate
        if not gpu_worker.envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
            graphs = 0
        worker.peak_activation_memory = ACTIVATIONS[runner.tp] + graphs
        return REQUESTED - (device.total - free) - worker.peak_activation_memory

    monkeypatch.setattr(Worker, "determine_available_memory", determine)
    made: Any = PATGPUWorker.__new__(PATGPUWorker)
    made._runtimes = {one.layout: one for one in runtimes_on(device)}
    made._base = next(iter(made._runtimes.values()))
    made.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    made.vllm_config = made._base.config

    def enter(runtime: Any) -> None:
        made._active, made.model_runner = runtime, runtime.runner

    made._enter = made._activate = enter
    made._buffer = None
    monkeypatch.setattr(worker_module, "block_ratio", lambda *args: 1)
    monkeypatch.setattr(worker_module, "layout_kv_cache_config", lambda *args: None)
    monkeypatch.setattr(worker_module, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(
        Worker,
        "initialize_from_config",
        lambda worker, config: worker.model_runner.initialize_kv_cache(config),
    )
    made.device_memory = device
    yield made
    del weights


@pytest.mark.parametrize("kv_transfer", ["migrate", "recompute"])
def test_the_kv_cache_leaves_what_layouts_take(worker: Any, kv_transfer: str) -> None:
    """Beside it is room for all that layouts take, and no more is kept free."""
    device = worker.device_memory
    worker._base.config.additional_config["pat"] = {"kv_transfer": kv_transfer}
    kv = worker.determine_available_memory()
    assert worker._active is worker._base
    staged = kv * STAGED if kv_transfer == "migrate" else 0
    cache = device.take(kv)
    pool = (0, 1 << 20)
    worker.initialize_from_config(None)
    for runtime in worker._runtimes.values():
        runtime.runner.cudagraph_manager.pool = pool
        runtime.runner.capture_model()
    largest = TABLES[1] + WORKSPACE[1]  # vLLM leaves one layout's to what is not requested
    left = REQUESTED - (device.total - device.free) + largest
    needed = max(staged, *ACTIVATIONS.values())
    assert (needed == staged) == (kv_transfer == "migrate"), "each is tested"
    del cache
    assert abs(left - needed) <= SEGMENT + 1000


def test_without_an_estimate_graphs_are_not_counted(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "0")
    more = worker.determine_available_memory()
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "1")
    less = worker.determine_available_memory()
    graphs = 4 * GRAPHS * OF_GRAPH + max(COMPUTED_WITH.values())
    assert graphs / (1 + STAGED) - SEGMENT <= more - less <= graphs + sum(TABLES.values())


def test_given_bytes_are_taken_as_they_are(worker: Any) -> None:
    worker.cache_config.kv_cache_memory_bytes = 7 * GiB
    before = worker.device_memory.free
    assert worker.determine_available_memory() == 7 * GiB
    assert worker.device_memory.free == before


def test_one_layout_is_as_vllm_has_it(worker: Any) -> None:
    base = worker._base
    worker._runtimes = {base.layout: base}
    worker._enter(base)
    Worker.determine_available_memory(worker)  # which leaves block tables
    assert worker.determine_available_memory() == Worker.determine_available_memory(worker)


@pytest.mark.parametrize("given_bytes", [None, 7 * GiB])
def test_on_cpu_a_switch_has_room(monkeypatch: pytest.MonkeyPatch, given_bytes: int | None) -> None:
    monkeypatch.setattr(
        CPUWorker, "determine_available_memory", lambda worker: given_bytes or 60 * GiB
    )
    worker: Any = PATCPUWorker.__new__(PATCPUWorker)
    runner = SimpleNamespace(get_kv_cache_spec=lambda: dict.fromkeys(range(NUM_LAYERS)))
    model = SimpleNamespace(get_total_num_kv_heads=lambda: KV_HEADS)
    config = SimpleNamespace(additional_config={}, model_config=model)
    worker._runtimes = {one: SimpleNamespace(config=config, runner=runner) for one in LAYOUTS}
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=given_bytes)
    kv = worker.determine_available_memory()
    assert kv == given_bytes or kv * (1 + STAGED) == pytest.approx(60 * GiB)


# -------------------------------------------------------------------- input embeddings


class RunnerV1:
    """Of a Model Runner V1 what makes its buffers."""

    device = torch.device("cpu")

    def __init__(self, tokens: int = 32) -> None:
        make = functools.partial(GPUModelRunner._make_buffer, self)  # type: ignore[arg-type]
        self.max_num_tokens = tokens
        self.inputs_embeds = make(tokens, 8, dtype=torch.bfloat16, numpy=False)
        self.others = [
            make(tokens, 8, dtype=torch.float32, numpy=False),
            make(4, 8, dtype=torch.bfloat16, numpy=False),
            make(tokens, dtype=torch.int32),
        ]


def test_layouts_share_input_embeddings() -> None:
    """Layouts have them in common, and nothing else that is like them."""
    host: Any = RunnerV1()
    for tokens in (32, 16, 64):
        with runners.input_embeddings_of(host):
            derived = RunnerV1(tokens)
        assert shares(derived.inputs_embeds, host) == (tokens <= 32)
        assert derived.inputs_embeds.cpu.shape == derived.inputs_embeds.gpu.shape == (tokens, 8)
        assert not any(shares(one, host) for one in derived.others)
    for no_runner_v1 in (None, SimpleNamespace(req_states=None)):
        with runners.input_embeddings_of(no_runner_v1):  # type: ignore[arg-type]
            assert not shares(RunnerV1().inputs_embeds, host)
    assert not shares(RunnerV1().inputs_embeds, host)


def shares(buffer: Any, host: Any) -> bool:
    """Whether a buffer begins where the input embeddings of `host` do, on the host and device."""
    pairs = [(one.cpu.data_ptr(), one.gpu.data_ptr()) for one in (buffer, host.inputs_embeds)]
    return pairs[0] == pairs[1]

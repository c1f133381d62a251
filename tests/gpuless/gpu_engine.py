"""A worker of layouts on an imitated GPU, and what of an engine calls it.

`PATGPUWorker` and vLLM's `Worker` run whole, from `init_device` on. In place of model runners,
weights and the exchange are objects that take memory as those do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.distributed import parallel_state
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker import workspace
from vllm.v1.worker.utils import allocate_kv_cache

from pat_vllm.executor.executor import PATExecutorMixin
from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.kv_transfer.plan import BlockMove, HeadRoute
from pat_vllm.layout import Layout
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.gpu_worker import PATGPUWorker
from pat_vllm.worker.side_stream import SideStream
from pat_vllm.worker.synthetic import SchedulerOutput, add_new, finish, make_requests
from tests.gpuless.device_memory import DeviceMemory

RANKS = KV_HEADS = 4
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2, 4))
NUM_LAYERS = 8
KV_LAYOUT = KVCacheLayout.LBNHC
COUNTERS = 1 << 16
"""Counters for penalties, 4 bytes each."""
TABLES = 1 << 12
"""Block tables and their like, which a runner allocates with its KV cache, 4 bytes each."""


@dataclass(frozen=True)
class Needs:
    """Bytes that a layout takes, by tp.

    Attributes:
        activations: in the largest step.
        graphs: for its CUDA graphs, in the pool that layouts share.
        kept: from the first step on.
    """

    activations: Mapping[int, int] = field(
        default_factory=lambda: {1: 3 << 20, 2: 2 << 20, 4: 1 << 20}
    )
    graphs: Mapping[int, int] = field(
        default_factory=lambda: {1: 512 << 10, 2: 768 << 10, 4: 256 << 10}
    )
    kept: Mapping[int, int] = field(default_factory=lambda: {1: 96 << 10, 2: 64 << 10, 4: 32 << 10})


class Runner:
    """Of a Model Runner V2 what the worker uses; it takes memory as vLLM's does."""

    needs = Needs()
    memory: DeviceMemory
    pools: dict[int, int]
    """Of CUDA graphs: bytes by handle."""
    lora_config = cudagraph_manager = None
    is_pooling_model = False
    max_num_reqs = 4
    model_state = SimpleNamespace(supports_mm_inputs=False)

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = config
        self.cache_config, self.compilation_config = config.cache_config, config.compilation_config
        self.tp = config.parallel_config.tensor_parallel_size
        self.group = parallel_state.get_tp_group()
        self.model_memory_usage = 0
        self.is_shut_down = 0
        self.expected = float(self.tp)
        token_ids = SimpleNamespace(gpu=torch.zeros(2, 2, device="cpu"))
        self.req_states = SimpleNamespace(req_id_to_index={}, all_token_ids=token_ids)
        self.kept: torch.Tensor | None = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        assert parallel_state.get_tp_group() is self.group
        self.model: Any = nn.Linear(8 // self.tp, 8, bias=False)
        self.model_memory_usage = self.model.weight.nbytes
        self.model.requires_grad_(False)
        self.model.weight.fill_(self.tp)
        self.model.register_buffer("cache", torch.zeros(16).fill_(10.0 + self.tp))
        counters = torch.zeros(COUNTERS, dtype=torch.int32)
        state = SimpleNamespace(output_bin_counts=counters, prompt_bin_mask=counters[:1])
        self.sampler = SimpleNamespace(penalties_state=state)

    def get_model(self) -> nn.Module:
        return self.model

    def get_draft_model(self) -> None:
        return None

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        spec = FullAttentionSpec(
            block_size=16, num_kv_heads=KV_HEADS // self.tp, head_size=8, dtype=torch.float32
        )
        return {f"layers.{i}": spec for i in range(NUM_LAYERS)}

    def profile_run(self, randomize_inputs: bool = False) -> None:
        if self.kept is None:
            self.kept = _memory(self.needs.kept[self.tp])
        _memory(self.needs.activations[self.tp])

    def profile_cudagraph_memory(self) -> int:
        """What the layout's graphs add to a pool."""
        torch.accelerator.empty_cache()
        pool = torch.cuda.graph_pool_handle()
        there = self.pools.get(pool, 0)
        self.pools[pool] = max(there, self.needs.graphs[self.tp])
        return self.pools[pool] - there

    def initialize_kv_cache(
        self,
        kv_cache_config: Any,
        is_profiling: bool = False,
        kv_cache_allocation_context: Any = None,
    ) -> None:
        self.tables = torch.zeros(TABLES, dtype=torch.int32).fill_(self.tp)
        with kv_cache_allocation_context or nullcontext():
            views = allocate_kv_cache(kv_cache_config, torch.device("cuda"), KV_LAYOUT)
        self.kv_caches = list(views.values())

    def needs_cudagraph_capture(self) -> bool:
        return False

    def maybe_remove_all_loras(self, config: None) -> None:
        pass

    def capture_model(self) -> int:
        """Layouts share a pool: a layout takes what its graphs need beyond the others'."""
        more = max(0, self.needs.graphs[self.tp] - self.memory.used("cudagraph"))
        with get_mem_allocator_instance().use_memory_pool("cudagraph"):
            self.graphs = _memory(more)
        return more

    def execute_model(self, step: SchedulerOutput, intermediate_tensors: Any = None) -> None:
        """A step, after a look at what it needs."""
        if not step.total_num_scheduled_tokens:
            return
        assert parallel_state.get_tp_group() is self.group
        assert bool((self.model.cache == 10.0 + self.tp).all()), "buffers are as they were loaded"
        assert bool((self.tables == self.tp).all()), "the runner's state is as it was"
        assert self.model.weight.eq(self.expected).all(), "the layout has the newest weights"
        _memory(self.needs.activations[self.tp])

    def sample_tokens(self, grammar_output: Any) -> None:
        pass

    def shutdown(self) -> None:
        self.is_shut_down += 1
        self.kv_caches.clear()
        del self.model


class Weights:
    """In place of `LayoutWeights`, where rows would be put in order."""

    strategy = "inplace"

    def __init__(self, config: VllmConfig, runtimes: Mapping[Layout, Any], rank: int) -> None:
        self.runtimes = runtimes
        self.arranged = LAYOUTS[0].tp

    def arrange(self, layout: Layout) -> int:
        if layout.tp == self.arranged:
            return 0
        assert Runner.memory.used("weights"), "rows are swapped where no memory is"
        self.arranged = layout.tp
        return 16

    def refresh(self, active: Layout) -> bool:
        base, *others = (one.runner for one in self.runtimes.values())
        for runner in others:
            runner.model.weight.fill_(float(base.model.weight[0, 0]) - base.tp + runner.tp)
        self.arrange(active)
        return True

    def finish_loading(self) -> None:
        pass


class Exchange:
    """In place of the exchange, in a switch that moves as much as any can.

    Attributes:
        stages: bytes of memory that it takes.
    """

    bytes_sent = stages = 0

    def __init__(self, group: Any, device: torch.device) -> None:
        pass

    @contextmanager
    def staging(self, moves: Any, source: torch.Tensor, target: torch.Tensor) -> Iterator[None]:
        _staged = _memory(self.stages)
        yield

    def run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        pass

    def measure(self, num_bytes: int) -> float:
        return 1.0


def _memory(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.int8)


def engine_config() -> VllmConfig:
    """For a Model Runner V2 on CUDA that captures graphs and may sleep."""
    config = VllmConfig(additional_config={"pat": {}})
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.world_size = RANKS
    vars(config.device_config)["device_type"] = "cuda"
    config.compilation_config.mode = CompilationMode.NONE
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL
    config.compilation_config.compile_ranges_endpoints = None
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4]
    config.compilation_config.max_cudagraph_capture_size = 4
    config.kernel_config.enable_jit_warmup = False
    config.cache_config.kv_cache_layout = KV_LAYOUT.name
    vars(config)["model_config"] = SimpleNamespace(
        dtype=torch.float32,
        enable_cumem_allocator=True,
        enable_nccl_comm_suspend=False,
        enforce_eager=False,
        get_total_num_kv_heads=lambda: KV_HEADS,
        max_model_len=64,
        multimodal_config=None,
        seed=0,
        sleep_mode_backend="cumem",
        sleep_preserve_parameter_names=None,
    )
    return config


def imitate_gpus(monkeypatch: pytest.MonkeyPatch, device: DeviceMemory) -> None:
    """Have workers start on the device, without processes, streams and kernels."""
    monkeypatch.setattr(Runner, "memory", device, raising=False)
    monkeypatch.setattr(Runner, "pools", {}, raising=False)
    handles = itertools.count()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(reset=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: nullcontext())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    monkeypatch.setattr("vllm.v1.worker.gpu.model_runner.GPUModelRunner", Runner)
    monkeypatch.setattr("vllm.config.kernel.IrOpPriorityConfig.set_default", lambda self: None)
    monkeypatch.setattr("vllm.ir.set_default_torch_wrap", lambda on: None)
    monkeypatch.setattr(workspace, "_manager", None)
    every = SimpleNamespace(world_size=RANKS, rank_in_group=0)
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(parallel_state, "_TP", every)
    monkeypatch.setattr(parallel_state, "_ETP", every)
    loader = SimpleNamespace(get_external_weight_memory=lambda config: 0)
    for name, value in {
        "freeze_gc_heap": lambda: None,
        "get_model_loader": lambda config: loader,
        "get_pp_group": lambda: alone,
        "has_ec_transfer": lambda: False,
        "init_worker_distributed_environment": lambda *args: None,
        "kernel_warmup": lambda worker: None,
        "report_usage_stats": lambda config: None,
        "set_current_vllm_config": lambda config: nullcontext(),
        "set_random_seed": lambda *args: None,
        "set_torch_threads_for_runtime": lambda: None,
        "warn_if_flashinfer_kernels_missing": lambda: None,
    }.items():
        monkeypatch.setattr(f"vllm.v1.worker.gpu_worker.{name}", value)
    for name, value in {
        "cpu_world_group": lambda: None,
        "device_world_group": lambda: None,
        "exit_when_orphaned": lambda: None,
        "Exchange": Exchange,
        "LayoutWeights": Weights,
        "make_tp_group": lambda layout, *args: SimpleNamespace(world_size=layout.tp),
        "seed_like": lambda *args: None,
        "set_current_vllm_config": lambda config: nullcontext(),
        "SideStream": lambda device: SideStream(torch.device("cpu")),
    }.items():
        monkeypatch.setattr(worker_module, name, value)
    monkeypatch.setattr(worker_module.current_platform, "update_block_size_for_backend", id)


def start_worker() -> Any:
    """A worker as vLLM's executor and engine core start it."""
    config = engine_config()
    worker: Any = PATGPUWorker(config, 0, 0, "", is_driver_worker=True)
    worker.init_device()
    worker.load_model()
    specs = worker.get_kv_cache_spec()
    worker.set_kv_cache_layout(KV_LAYOUT.name)
    available = worker.determine_available_memory()
    worker._exchange.stages = int(worker._staged() * available)
    groups = [KVCacheGroupSpec(list(specs), next(iter(specs.values())))]
    kv_cache_config = get_kv_cache_config_from_groups(config, groups, available)
    kv_cache_config.kv_cache_layout = KV_LAYOUT.name
    worker.initialize_from_config(kv_cache_config)
    worker.compile_or_warm_up_model()
    return worker


class _Calls:
    """Of vLLM's executor what sleep rests on; calls of the one worker in place of its RPC."""

    sleep, wake_up, discard = Executor.sleep, Executor.wake_up, Executor.discard
    is_sleeping = Executor.is_sleeping

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Any]:
        return [getattr(self.worker, method)(*args, **(kwargs or {}))]  # type: ignore[attr-defined]


class Engine(PATExecutorMixin, _Calls):  # type: ignore[misc]
    """Calls a worker as an engine does: vLLM's executor with what PAT adds to it."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.sleeping_tags: set[str] = set()
        self._commands = {}
        self._stale = self._in_lanes = False
        self._lanes: Any = object()
        self._switches = 0
        self.layout = LAYOUTS[0]

    def step(self) -> None:
        """A step in the worker's active layout."""
        self._refresh_weights()
        assert self.worker._active.layout == self.layout
        assert self.worker._weights.arranged == self.layout.tp
        requests = make_requests("step", [4], 1, 16, decoding=False)
        self.worker.execute_model(add_new(SchedulerOutput.make_empty(), requests, True, 1))
        self.worker.sample_tokens(None)
        self.worker.execute_model(finish(requests))

    def switch_to(self, layout: Layout) -> None:
        """The largest switch to a layout."""
        self._refresh_weights()
        self._switches += 1
        route = HeadRoute(0, 0, range(1), range(1))
        moves = (BlockMove(route, (1,), (1,)),)
        self.worker.pat_switch(SwitchCommand(self._switches, self.layout, layout, moves))
        self.layout = layout

    def update(self, added: float) -> None:
        """New weights from a trainer, larger than those at start by a number."""

        def load() -> tuple[int, int]:
            runner = self.worker.model_runner
            runner.model.weight.fill_(runner.tp + added)
            return runner.tp, self.worker._weights.arranged

        self.worker.load = load
        assert self.collective_rpc("load") == [(LAYOUTS[0].tp, LAYOUTS[0].tp)]
        for runtime in self.worker._runtimes.values():
            runtime.runner.expected = runtime.layout.tp + added

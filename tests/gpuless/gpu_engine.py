"""A worker of layouts on an imitated GPU, and what of an engine calls it.

`PATGPUWorker` and vLLM's `Worker` run whole, from `init_device` on. In place of model runners,
weights and the exchange are objects that take memory as those do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import ir
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.config import vllm as config_module
from vllm.config.kernel import IrOpPriorityConfig
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.worker import gpu_model_runner, gpu_worker, workspace
from vllm.v1.worker.gpu import cudagraph_utils, model_runner
from vllm.v1.worker.utils import AttentionGroup

from pat_vllm.executor.executor import PATExecutorMixin
from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.executor.weight_calls import WeightCalls
from pat_vllm.kv_transfer.plan import BlockMove, HeadRoute
from pat_vllm.layout import Layout
from pat_vllm.worker import late_memory
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.gpu_worker import PATGPUWorker
from pat_vllm.worker.late_memory import staged_by_switches
from pat_vllm.worker.side_stream import SideStream
from pat_vllm.worker.synthetic import SchedulerOutput, add_new, finish, make_requests
from tests.gpuless.device_memory import DeviceMemory
from tests.gpuless.gpu_runner import (
    KV_HEADS,
    KV_LAYOUT,
    LAYOUTS,
    RANKS,
    RUNNERS,
    Runner,
    allocated,
    create_builders,
)
from tests.gpuless.planning import planning, tell_kv_cache_layout
from tests.gpuless.replaced import replace
from tests.support.kinds import full


class Weights:
    """In place of `LayoutWeights`, where rows would be put in order."""

    strategy = "inplace"
    staging_bytes = 0
    loading = False
    drafter_is_stale = False

    def __init__(self, config: VllmConfig, runtimes: Mapping[Layout, Any], rank: int) -> None:
        self.runtimes = runtimes
        self.arranged = LAYOUTS[0].tp

    def loading_into(self, runtime: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def arrange(self, layout: Layout) -> int:
        if layout.tp == self.arranged:
            return 0
        assert Runner.memory.used("weights"), "rows are swapped where no memory is"
        self.arranged = layout.tp
        return 16

    def refresh(self, active: Layout) -> bool:
        base, *others = (runtime.runner for runtime in self.runtimes.values())
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
    def staging(self, parts: Any) -> Iterator[None]:
        _staged = allocated(self.stages)
        yield

    def run(self, views: Any) -> None:
        pass

    def measure(self, num_bytes: int) -> float:
        return 1.0


def engine_config() -> VllmConfig:
    """For CUDA, with graphs and sleep mode."""
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
        original_max_model_len=None,
        seed=0,
        sleep_mode_backend="cumem",
        sleep_preserve_parameter_names=None,
        supports_kv_cache_grouping=False,
    )
    return config


class Platform:
    """CUDA, as far as pools of graphs go."""

    _global_graph_pool = None

    def graph_pool_handle(self) -> Any:
        return torch.cuda.graph_pool_handle()


class Group:
    """A group of ranks; `destroyed` has what was the TP group whenever it was destroyed."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.rank_in_group = world_size, 0
        self.destroyed: list[Any] = []

    def destroy(self) -> None:
        self.destroyed.append(parallel_state._TP)


def imitate_gpus(monkeypatch: pytest.MonkeyPatch, device: DeviceMemory, runner: str = "v2") -> None:
    """Have workers start on the device, without processes, streams and kernels.

    Args:
        runner: which of vLLM's model runners they have, of `RUNNERS`.
    """
    monkeypatch.setattr(Runner, "memory", device, raising=False)
    put = partial(replace, put=monkeypatch.setattr)
    put(AttentionGroup, "create_metadata_builders", create_builders)
    put(cudagraph_utils, "current_platform", Platform())
    put(cudagraph_utils, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setattr(late_memory, "set_current_vllm_config", lambda config: nullcontext())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "v2")))
    put(config_module, "HAS_TRITON", True)
    if hasattr(gpu_worker, "HAS_TRITON"):  # since vLLM 0.33
        put(gpu_worker, "HAS_TRITON", True)
    for module in (model_runner, gpu_model_runner):
        put(module, "GPUModelRunner", RUNNERS[runner])
    put(IrOpPriorityConfig, "set_default", lambda self: None)
    put(ir, "set_default_torch_wrap", lambda on: None)
    put(workspace, "_manager", None)
    every: Any = Group(RANKS)
    alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    put(parallel_state, "_TP", every)
    put(parallel_state, "_ETP", every)
    loader = SimpleNamespace(get_external_weight_memory=lambda config: 0)
    for name, value in {
        "freeze_gc_heap": lambda: None,
        "get_model_loader": lambda config: loader,
        "get_pp_group": lambda: alone,
        "init_worker_distributed_environment": lambda *args: None,
        "kernel_warmup": lambda worker: None,
        "report_usage_stats": lambda config: None,
        "set_current_vllm_config": lambda config: nullcontext(),
        "set_random_seed": lambda *args: None,
        "set_torch_threads_for_runtime": lambda: None,
    }.items():
        put(gpu_worker, name, value)
    replaced: dict[str, Any] = {
        "cpu_world_group": lambda: None,
        "exchange_group": lambda: None,
        "exit_when_orphaned": lambda: None,
        "Exchange": Exchange,
        "LayoutWeights": Weights,
        "make_tp_group": lambda layout, *args: every if layout.replicas == 1 else Group(layout.tp),
        "seed_replica": lambda *args: None,
        "set_current_vllm_config": lambda config: nullcontext(),
        "SideStream": lambda device: SideStream(torch.device("cpu")),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(worker_module, name, value)
    put(current_platform, "update_block_size_for_backend", id)


def load_worker() -> Any:
    """A worker as vLLM's executor starts it, whose KV cache has no size yet."""
    worker: Any = PATGPUWorker(engine_config(), 0, 0, "", is_driver_worker=True)
    worker.init_device()
    worker.load_model()
    tell_kv_cache_layout(worker, worker.vllm_config, KV_LAYOUT.name)
    return worker


def start_worker() -> Any:
    """A worker as vLLM's engine core has it at the end."""
    worker = load_worker()
    specs = worker.get_kv_cache_spec()
    available = worker.determine_available_memory()
    worker._exchange.stages = int(staged_by_switches(worker._runtimes) * available)
    groups = [KVCacheGroupSpec(list(specs), next(iter(specs.values())))]
    kv_cache_config = planning.get_kv_cache_config_from_groups(
        worker.vllm_config, groups, available
    )
    kv_cache_config.kv_cache_layout = KV_LAYOUT.name
    worker.initialize_from_config(kv_cache_config)
    worker.compile_or_warm_up_model()
    return worker


class _Calls:
    """Of vLLM's executor what sleep rests on; calls of the one worker in place of its RPC."""

    sleep, wake_up, discard = Executor.sleep, Executor.wake_up, Executor.discard
    is_sleeping = Executor.is_sleeping
    futures_queue = ()

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
        self._weight_calls = WeightCalls()
        self._lanes: Any = object()
        self._switches = 0
        self.layout = LAYOUTS[0]

    def _call_together(self, method: str, *args: Any, check: Any = None, **options: Any) -> Any:
        replies = self.collective_rpc(method, args=args)
        return check(replies) if check else replies

    def step(self) -> None:
        """A step in the worker's active layout."""
        self.refresh_weights()
        assert self.worker._active.layout == self.layout
        assert self.worker._weights.arranged == self.layout.tp
        requests = make_requests("step", [4], 1, full(KV_HEADS), decoding=False)
        self.worker.execute_model(add_new(SchedulerOutput.make_empty(), requests, True, 1))
        self.worker.sample_tokens(None)
        self.worker.execute_model(finish(requests))

    def switch_to(self, layout: Layout) -> None:
        """The largest switch to a layout."""
        self.refresh_weights()
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

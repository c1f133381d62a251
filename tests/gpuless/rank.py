"""A rank with an imitated GPU: it starts PAT's worker, switches layouts, and says what it calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm.distributed.parallel_state as parallel_state
from torch.overrides import TorchFunctionMode
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.worker_base import CompilationTimes

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.kv_transfer.connector import PATConnector
from pat_vllm.kv_transfer.plan import plan_moves
from pat_vllm.layout import Layout
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.gpu_worker import PATGPUWorker
from pat_vllm.worker.synthetic import synthetic_kv
from tests.gpuless.communicators import Recorder, imitate_communicators, record_torch
from tests.gpuless.replaced import replace
from tests.gpuless.sequences import Event
from tests.support.kinds import full

HIDDEN, LAYERS = 64, 2
BLOCK_SIZE, CONTENT, BLOCKS = 2, 8, 16


class OnCpu(TorchFunctionMode):
    """Has tensors that are made on a GPU lie on CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", "cpu") == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class Hidden(torch.Tensor):
    """Hidden states, which say that they are on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def imitate_device(recorder: Recorder, num_devices: int) -> None:
    """Have torch and vLLM's worker find GPUs."""

    def set_device(device: torch.device) -> None:
        recorder.device = torch.device(device).index
        recorder.question("current device", recorder.device)

    accelerator: Any = torch.accelerator
    accelerator.device_count = lambda: num_devices
    accelerator.set_device_index = set_device
    accelerator.get_memory_info = lambda: (0, 0)
    accelerator.empty_cache = accelerator.synchronize = lambda *args: None
    cuda: Any = torch.cuda
    cuda.Stream = cuda.current_stream = mock.MagicMock()
    cuda.stream = lambda stream: nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    replace(type(current_platform), "dist_backend", "gloo")
    for name in (
        "MemorySnapshot",
        "get_model_loader",
        "init_workspace_manager",
        "report_usage_stats",
        "request_memory",
        "warn_if_flashinfer_kernels_missing",
    ):
        replace(gpu_worker, name, mock.MagicMock())
    worker: Any = worker_module
    worker.exit_when_orphaned = lambda: None
    worker.LayoutWeights = lambda *args: SimpleNamespace(arrange=lambda layout: 0)


def forward(num_tokens: int) -> None:
    """What a model asks of its tensor-parallel group, by each way of an all-reduce."""
    group = parallel_state.get_tp_group()
    for _ in range(LAYERS):
        states = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16)
        group.all_reduce(states.as_subclass(Hidden))
        group.all_reduce(states[None])
        group.all_reduce(torch.zeros(num_tokens, dtype=torch.int32))


def compile_model() -> None:
    """What vLLM's pass does that fuses all-reduces with norms, when a model is compiled."""
    from vllm.distributed.device_communicators import flashinfer_all_reduce as flashinfer

    group = parallel_state.get_tp_group()
    if group.world_size > 1:
        for get in (flashinfer.get_fi_ar_workspace, flashinfer.get_fi_ar_quant_workspace):
            get(
                world_size=group.world_size,
                rank=group.rank_in_group,
                max_token_num=1024,
                hidden_dim=HIDDEN,
                dtype=torch.bfloat16,
                group=group.cpu_group,
            )


def measure(worker: Any) -> int:
    """In place of vLLM's profiling run."""
    compile_model()
    forward(64)
    return 1 << 30


def capture(worker: Any) -> CompilationTimes:
    """In place of vLLM's warm-up and its capture of CUDA graphs."""
    forward(8)
    with parallel_state.graph_capture(worker.device):
        forward(8)
    return CompilationTimes(language_model=0.0, encoder=0.0)


class Worker(PATGPUWorker):
    """PAT's worker, whose models do nothing but communicate."""

    def _make_runner(self, config: Any) -> Any:
        ids = SimpleNamespace(gpu=torch.empty(0, 0))
        states = SimpleNamespace(req_id_to_index={}, all_token_ids=ids)
        return SimpleNamespace(
            req_states=states,
            speculative_config=None,
            speculator=None,
            get_kv_cache_spec=lambda: {},
            get_model=lambda: None,
            reset_mm_cache=lambda: None,
            reset_encoder_cache=lambda: None,
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            forward(scheduler_output.total_num_scheduled_tokens)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return None


def give_kv_cache(worker: Any) -> None:
    """A small KV cache for every layout, in one buffer."""
    kv_heads = worker.model_config.get_total_num_kv_heads()
    worker._kinds = full(kv_heads, BLOCK_SIZE)
    buffer = torch.zeros(LAYERS * BLOCKS * kv_heads * BLOCK_SIZE * CONTENT, dtype=torch.bfloat16)
    for layout, runtime in worker._runtimes.items():
        heads = layout.kv_heads_per_rank(kv_heads)
        blocks = BLOCKS * kv_heads // heads
        layers = buffer.view(LAYERS, blocks, heads, BLOCK_SIZE, CONTENT)
        spec = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_SIZE))
        runtime.kv_cache_config = SimpleNamespace(num_blocks=blocks, kv_cache_groups=[spec])
        runtime.connector = PATConnector.__new__(PATConnector)
        views = {f"layers.{i}": layer for i, layer in enumerate(layers)}
        runtime.connector._group_of = dict.fromkeys(views, 0)
        runtime.connector._specs = [
            FullAttentionSpec(
                block_size=BLOCK_SIZE,
                num_kv_heads=heads,
                head_size=CONTENT // 2,
                dtype=torch.bfloat16,
            )
        ]
        runtime.connector.register_kv_caches(views)


def switch(worker: Any, recorder: Recorder, switch_id: int, source: Layout, target: Layout) -> None:
    """A switch that carries a request, then steps of the replicas, of each another number."""
    kv_heads = worker.model_config.get_total_num_kv_heads()
    requests = synthetic_kv(source, target, full(kv_heads), BLOCKS)
    moves = tuple(plan_moves(source, target, full(kv_heads), requests))
    recorder.phase = f"switch from {source} to {target}"
    worker.pat_switch(SwitchCommand(switch_id, source, target, moves, {"request": 0}))
    recorder.phase = f"steps in {target}"
    for _ in range(1 + target.replica_of(worker.rank)):
        step = SchedulerOutput.make_empty()
        step.total_num_scheduled_tokens = 3
        worker.execute_model(step)


def live(
    rank: int, num_ranks: int, config: Any, address: str, tell: Callable[[Event], None]
) -> None:
    """Start a worker as the engine does, and switch between every two of its layouts.

    `tell` is called with each event before it happens.
    """
    torch.set_num_threads(1)
    recorder = Recorder(rank, num_ranks, tell)
    record_torch(recorder)
    imitate_communicators(recorder)
    imitate_device(recorder, num_ranks)
    replace(gpu_worker.Worker, "determine_available_memory", measure)
    replace(gpu_worker.Worker, "compile_or_warm_up_model", capture)
    replace(gpu_worker.Worker, "_maybe_activate_jit_monitor", lambda worker: None)
    config.cache_config.kv_cache_memory_bytes = 1 << 30
    config.model_config.enable_nccl_comm_suspend = True
    with OnCpu(), set_current_vllm_config(config):
        worker: Any = Worker(config, rank, rank, address, is_driver_worker=rank == 0)
        worker.init_device()
        worker._sleep_mode_backend = mock.MagicMock()
        give_kv_cache(worker)
        worker.determine_available_memory()
        worker.compile_or_warm_up_model()
        # Every ordered pair; in between, back to where the next begins.
        active, number = worker._base.layout, 0
        for target in itertools.chain.from_iterable(permutations(worker._runtimes, 2)):
            if target != active:
                switch(worker, recorder, number := number + 1, active, target)
                active = target
        recorder.phase = "sleep"
        worker.sleep()
        recorder.phase = "wake up"
        worker.wake_up()
        recorder.phase = "end"
        recorder.meet("end", None)

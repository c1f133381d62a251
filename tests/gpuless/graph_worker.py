"""A PAT worker for GPUs whose model runners run on CPU, with CUDA graphs imitated.

One process plays one rank. vLLM's runners, graph manager, sampler and layers are its own, and so
is all of PAT's worker. Stand-ins are attention kernels that, as a GPU's, read all that changes
from persistent buffers, and the sums of a TP group, of which the other ranks' parts are made up.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  # changes torch, so before the rest
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.workspace import init_workspace_manager

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.layout import Experts, Layout
from pat_vllm.patches.expert_layers import _plain_experts
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.gpu_worker import PATGPUWorker
from tests.gpuless.cuda_graphs import Driver
from tests.gpuless.planning import plan_kv_cache, tell_kv_cache_layout
from tests.gpuless.replaced import replace
from tests.support.models import random_model

SIZES = [1, 4, 8]
"""Batch sizes to capture, in tokens."""
DRAFT_SIZES = [16]
"""More of them where requests verify drafts."""
NGRAM = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
MAX_NUM_SEQS = 4
KV_BYTES = 1 << 20
_ATTENTION = "tests.gpuless.graph_attention.Backend"


class Group(parallel_state.GroupCoordinator):
    """A layout's TP group, seen from one rank. What the others would add is made up."""

    def __init__(self, layout: Layout, rank: int, driver: Driver) -> None:
        self.unique_name = str(layout)
        self.rank = rank
        self.ranks = list(layout.ranks_of(layout.replica_of(rank)))
        self.world_size = layout.tp
        self.rank_in_group = layout.tp_rank_of(rank)
        self.device = torch.device("cpu")
        self.cpu_group = None  # type: ignore[assignment]
        # Mixtures look at its size.
        self.device_group = SimpleNamespace(size=lambda: self.world_size)  # type: ignore[assignment]
        self.device_communicator = None
        self._driver = driver

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return input_
        self._driver.enqueue(self.unique_name, "all-reduce", input_)
        return input_ + torch.linspace(-1, 1, input_.shape[-1])

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self._driver.enqueue(self.unique_name, "all-gather", input_)
        return torch.cat([input_] * self.world_size, dim)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor:
        return self.all_gather(input_, dim)

    @contextmanager
    def graph_capture(self, graph_capture_context: Any = None) -> Iterator[Any]:
        self._driver.stream = graph_capture_context.stream
        try:
            yield graph_capture_context
        finally:
            self._driver.stream = None


class RunnerV1(CPUModelRunner):
    """vLLM's for CPU, which captures as on a GPU."""

    load_model = GPUModelRunner.load_model
    get_model = GPUModelRunner.get_model

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Nothing: Triton's interpreter cannot run vLLM's kernel for top-k and top-p."""


class GraphWorker(PATGPUWorker):
    """See the module."""

    driver: Driver
    graph_pool: Any
    """vLLM's own, when the worker has started."""

    @classmethod
    def start(
        cls,
        ranks: int,
        rank: int,
        driver: Driver,
        use_v2: bool = True,
        warm: bool = False,
        **options: Any,
    ) -> GraphWorker:
        """A worker of an engine with all layouts of `ranks` ranks, as vLLM starts it.

        Args:
            use_v2: whether with Model Runner V2.
            warm: whether PAT warms each layout up with requests, which takes longer than the rest.
            options: of `_engine_config`.
        """
        driver.install(type(current_platform))
        # Other processes have one engine, and do not go on after an error.
        set_cudagraph_capturing_enabled(True)
        replace(BreakableCUDAGraphCapture, "_tls", threading.local())
        runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(use_v2))}
        warm_up = worker_module.warm_up if warm else lambda *args: 1.0
        with (
            mock.patch.dict(os.environ, runner),
            mock.patch.object(worker_module, "warm_up", warm_up),
        ):
            return cls._start(_engine_config(ranks, **options), rank, driver)

    @classmethod
    def _start(cls, config: Any, rank: int, driver: Driver) -> GraphWorker:
        with set_current_vllm_config(config):
            worker = cls(config, rank, rank, "")
            worker.driver = driver
            worker.init_device()
            worker.load_model()
            specs = worker.get_kv_cache_spec()
            names = worker.get_supported_kv_cache_layouts()
            layout = resolve_kv_cache_layout(config, [names], list(specs.values()))
            tell_kv_cache_layout(worker, config, layout.name)
            driver.phase = "measuring"
            worker.determine_available_memory()
            config.cache_config.kv_cache_layout = layout.name
            kv_cache_config = plan_kv_cache(config, specs, KV_BYTES)
            driver.phase = "starting"
            worker.initialize_from_config(kv_cache_config)
            worker.compile_or_warm_up_model()
        worker.graph_pool = current_platform.get_global_graph_pool()
        return worker

    def init_device(self) -> None:
        def group(layout: Layout, *args: Any) -> Group:
            return Group(layout, self.rank, self.driver)

        with mock.patch.object(worker_module, "make_tp_group", group):
            super().init_device()

    def _make_runner(self, config: Any) -> Any:
        if config.use_v2_model_runner:
            return super()._make_runner(config)
        return RunnerV1(config, self.device)

    @property
    def runtimes(self) -> dict[int, Any]:
        """What there is of each layout, by tp."""
        return {layout.tp: runtime for layout, runtime in self._runtimes.items()}

    def switch(self, switch_id: int, tp: int) -> None:
        """Go to the layout of this tp. Requests are computed again there."""
        target = self.runtimes[tp].layout
        self.pat_switch(SwitchCommand(switch_id, self._active.layout, target))

    def load(self, name: str) -> None:
        """An update, in memory that stays: the weights of another checkpoint."""
        from safetensors.torch import load_file

        weights = load_file(random_model(name) / "model.safetensors")
        self.model_runner.get_model().load_weights(iter(weights.items()))

    def replace_parameters(self) -> None:
        """An update that brings its own memory."""
        for parameter in self.model_runner.get_model().parameters():
            parameter.data = parameter.data * 0.75


def _engine_config(
    ranks: int, graphs: bool = True, drafts: int = 0, experts: Experts | None = None
) -> Any:
    """An engine's.

    Args:
        graphs: whether it captures.
        drafts: the most draft tokens; 0 without speculation.
        experts: how those of a mixture lie in groups; None: a model without experts.
    """
    pat: dict[str, Any] = {"policy": {"kind": "static", "tp": 1}, "weights": "inplace"}
    pat |= {"kv_transfer": "recompute", "experts": experts or "auto"}
    model = "repeating" if drafts else "qwen3" if experts is None else "qwen3_moe"
    config = EngineArgs(
        model=str(random_model(model)),
        tensor_parallel_size=ranks,
        distributed_executor_backend="pat",
        additional_config={"pat": pat},
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=64 if drafts else 32,
        block_size=32,
        seed=7,
        speculative_config=NGRAM | {"num_speculative_tokens": drafts} if drafts else None,
    ).create_engine_config()
    # vLLM's CPU platform allows no graphs.
    config.model_config.enforce_eager = not graphs
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE if graphs else CUDAGraphMode.NONE
    sizes = [*SIZES, *DRAFT_SIZES] if drafts else SIZES
    compilation.cudagraph_capture_sizes = list(sizes)
    compilation.max_cudagraph_capture_size = max(sizes)
    return config


def _init_device(worker: Any) -> None:
    """As vLLM's worker, on CPU."""
    worker.device = torch.device("cpu")
    worker.init_snapshot = SimpleNamespace(free_memory=60 << 30, total_memory=80 << 30)
    worker.requested_memory = 50 << 30
    init_workspace_manager(worker.device)
    worker.model_runner = worker._make_model_runner()


@contextmanager
def _memory_profiling(*args: Any, **options: Any) -> Iterator[Any]:
    yield SimpleNamespace(
        after_profile=SimpleNamespace(free_memory=50 << 30),
        total_consumed=10 << 30,
        transient_peak_headroom=1 << 30,
        non_kv_cache_memory=11 << 30,
    )


def _all_experts(
    self: Any,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """As `PlainExperts.apply`, with each expert for every token: what is computed depends on no
    token, as in a GPU's kernel."""
    local = topk_ids.long()
    if layer.expert_map is not None:
        local = layer.expert_map[local]
    output = torch.zeros_like(x)
    for expert, (w13, w2) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        gate, up = torch.nn.functional.linear(x, w13).chunk(2, dim=-1)
        of_expert = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2)
        output = output + of_expert * (topk_weights * (local == expert)).sum(dim=1, keepdim=True)
    return output


def prepare_process() -> None:
    """Have this process's vLLM, for good, run on CPU what it runs on a GPU."""
    import vllm.compilation.breakable_cudagraph as breakable
    import vllm.compilation.cuda_graph as wrapper
    import vllm.model_executor.models.registry as registry
    import vllm.v1.worker.gpu.model_runner as runner_module

    def nothing(*args: Any, **options: Any) -> None:
        pass

    @contextmanager
    def no_context(*args: Any, **options: Any) -> Iterator[None]:
        yield

    def install(owner: Any, put: Callable[..., Any] = replace, **replaced: Any) -> None:
        for name, value in replaced.items():
            getattr(owner, name)  # or nothing would be replaced
            put(owner, name, value)

    install(
        type(current_platform),
        get_attn_backend_cls=staticmethod(lambda *args, **options: _ATTENTION),
        # Operators written in Python would be captured as one, and read Python's state at replay.
        opaque_attention_op=staticmethod(lambda: False),
    )
    install(torch.accelerator, setattr, get_memory_info=lambda *args: (60 << 30, 80 << 30))
    # Memory that a graph owns lives as long as the graph.
    install(
        breakable, weak_ref_tensor=lambda tensor: tensor, weak_ref_tensors=lambda tensors: tensors
    )
    install(wrapper, weak_ref_tensors=lambda tensors: tensors)
    # They collect garbage again and again, among all that vLLM has imported.
    install(runner_module, freeze_gc_for_cudagraph_capture=no_context)
    install(GPUModelRunner, _freeze_gc=no_context)
    on_cuda = SimpleNamespace(
        is_cuda_alike=lambda: True,
        is_cpu=lambda: False,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
    )
    install(
        gpu_worker,
        current_platform=on_cuda,
        memory_profiling=_memory_profiling,
        kernel_warmup=nothing,
        freeze_gc_heap=nothing,
        enable_gpu_sync_check=nothing,
    )
    install(gpu_worker.Worker, init_device=_init_device, _scoped_allocator_max_split=no_context)
    install(
        worker_module,
        setattr,
        exit_when_orphaned=nothing,
        exchange_group=nothing,
        warm_up_moves=nothing,
        # There is nobody to exchange KV with.
        Exchange=lambda *args: SimpleNamespace(bytes_sent=0, measure=lambda num_bytes: 1.0),
    )
    install(_plain_experts(), setattr, apply=_all_experts)
    # vLLM looks at each new model class in a process of its own, which takes long.
    install(registry, _run_in_subprocess=lambda fn: fn())
    config = _engine_config(1, False, experts="tp")  # of a model with all kinds of groups
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)

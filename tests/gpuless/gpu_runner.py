"""Model runners on an imitated GPU: of vLLM's what its worker uses, with their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.device_allocator import get_mem_allocator_instance
from vllm.distributed import parallel_state
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as StockV1
from vllm.v1.worker.utils import AttentionGroup, allocate_kv_cache

from pat_vllm.layout import Layout
from pat_vllm.worker.synthetic import SchedulerOutput
from tests.gpuless.device_memory import DeviceMemory, Graph

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
        workspace: for attention, which comes with the KV cache.
    """

    activations: Mapping[int, int] = field(
        default_factory=lambda: {1: 3 << 20, 2: 2 << 20, 4: 1 << 20}
    )
    graphs: Mapping[int, int] = field(
        default_factory=lambda: {1: 512 << 10, 2: 768 << 10, 4: 256 << 10}
    )
    kept: Mapping[int, int] = field(default_factory=lambda: {1: 96 << 10, 2: 64 << 10, 4: 32 << 10})
    workspace: Mapping[int, int] = field(
        default_factory=lambda: {1: 256 << 10, 2: 128 << 10, 4: 128 << 10}
    )


def allocated(num_bytes: int) -> torch.Tensor:
    """Some of the device's."""
    return torch.zeros(num_bytes, dtype=torch.int8)


def capture_stream() -> Any:
    """The one that vLLM's `graph_capture` would capture on."""
    return parallel_state.GraphCaptureContext(torch.cuda.Stream()).stream


class Builder:
    """Of FlashInfer's metadata builder what has to do with its workspace."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._workspace: torch.Tensor | None = None

    def _get_workspace_buffer(self) -> torch.Tensor:
        if self._workspace is None:
            self._workspace = self._make()
        return self._workspace

    def set_workspace_buffer(self, workspace: torch.Tensor) -> None:
        self._workspace = workspace


def create_builders(group: Any) -> None:
    """`AttentionGroup.create_metadata_builders` for FlashInfer."""
    group.metadata_builders = [Builder(group.make)]


class Runner:
    """Of a Model Runner V2 what the worker uses; it takes memory as vLLM's does."""

    needs = Needs()
    memory: DeviceMemory
    lora_config = speculative_config = structured_outputs_worker = speculator = None
    is_pooling_model = False
    counters = COUNTERS
    max_num_reqs = 4
    model_state = SimpleNamespace(supports_mm_inputs=False)
    eplb = SimpleNamespace(suppress=nullcontext)  # since vLLM 0.33

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.vllm_config = config
        self.cache_config, self.compilation_config = config.cache_config, config.compilation_config
        self.tp = config.parallel_config.tensor_parallel_size
        self.group = parallel_state.get_tp_group()
        self.model_memory_usage = 0
        self.is_shut_down = 0
        self.expected = float(self.tp)
        self.kept: torch.Tensor | None = None
        self.keep_requests()

    def keep_requests(self) -> None:
        token_ids = SimpleNamespace(gpu=torch.zeros(2, 2, device="cpu"))
        self.req_states = SimpleNamespace(req_id_to_index={}, all_token_ids=token_ids)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        assert parallel_state.get_tp_group() is self.group
        self.model: Any = nn.Linear(8 // self.tp, 8, bias=False)
        self.model_memory_usage = self.model.weight.nbytes
        self.model.requires_grad_(False)
        self.model.weight.fill_(self.tp)
        self.model.register_buffer("cache", torch.zeros(16).fill_(10.0 + self.tp))
        # For each request; a wider layout runs more.
        counters = torch.zeros(self.counters * self.tp, dtype=torch.int32)
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
            self.kept = allocated(self.needs.kept[self.tp])
        allocated(self.needs.activations[self.tp])

    def profile_cudagraph_memory(self) -> int:
        return cudagraph_utils.profile_cudagraph_memory(self)  # type: ignore[arg-type]

    def initialize_kv_cache(
        self,
        kv_cache_config: Any,
        is_profiling: bool = False,
        kv_cache_allocation_context: Any = None,
    ) -> None:
        assert parallel_state.get_tp_group() is self.group
        self.is_profiling = is_profiling
        self.tables = torch.zeros(TABLES, dtype=torch.int32).fill_(self.tp)
        group: Any = SimpleNamespace(make=lambda: allocated(self.needs.workspace[self.tp]))
        AttentionGroup.create_metadata_builders(group)
        group.metadata_builders[0]._get_workspace_buffer()
        self.attn_groups = [[group]]
        self.cudagraph_manager: Any = SimpleNamespace(
            needs_capture=lambda: True,
            use_breakable_cg=False,
            _capture_descs={CUDAGraphMode.FULL: range(3)},
        )
        with kv_cache_allocation_context or nullcontext():
            views = allocate_kv_cache(kv_cache_config, torch.device("cuda"), KV_LAYOUT)
        self.kv_caches = list(views.values())

    def needs_cudagraph_capture(self) -> bool:
        """Graphs are measured (vLLM 0.33 asks here, before its manager), then captured at once."""
        return self.is_profiling

    def maybe_remove_all_loras(self, config: None) -> None:
        pass

    def reset_mm_cache(self) -> None:
        """It takes text alone."""

    def reset_encoder_cache(self) -> None:
        """Likewise."""

    def capture_model(self, profile_only: bool = False) -> int:
        """Layouts share a pool: a layout takes what its graphs need beyond the others'."""
        if profile_only:
            manager = self.cudagraph_manager
            manager.graph = Graph()
            needed = self.needs.graphs[self.tp]
            more = self.memory.capture(manager.graph, manager.pool, capture_stream(), needed)
            manager._capture_mem_samples.append(more)
            return more
        of_stream = self.memory.offloaded_graphs
        more = max(0, self.needs.graphs[self.tp] - of_stream[stream := capture_stream()])
        of_stream[stream] += more
        with get_mem_allocator_instance().use_memory_pool("cudagraph"):
            self.graphs = allocated(more)
        return more

    def execute_model(self, step: SchedulerOutput, intermediate_tensors: Any = None) -> None:
        """A step, after a look at what it needs."""
        if not step.total_num_scheduled_tokens:
            return
        assert parallel_state.get_tp_group() is self.group
        assert bool((self.model.cache == 10.0 + self.tp).all()), "buffers are as they were loaded"
        assert bool((self.tables == self.tp).all()), "the runner's state is as it was"
        assert self.model.weight.eq(self.expected).all(), "the layout has the newest weights"
        allocated(self.needs.activations[self.tp])

    def sample_tokens(self, grammar_output: Any) -> None:
        pass

    def shutdown(self) -> None:
        self.is_shut_down += 1
        self.kv_caches.clear()
        del self.model


class RunnerV1(Runner):
    """The same of a Model Runner V1."""

    counters = 0
    _init_minimal_kv_cache_for_profiling = StockV1._init_minimal_kv_cache_for_profiling
    _cleanup_profiling_kv_cache = StockV1._cleanup_profiling_kv_cache

    def profile_cudagraph_memory(self) -> int:
        torch.accelerator.empty_cache()
        pool = torch.cuda.graph_pool_handle()
        return self.memory.capture(Graph(), pool, capture_stream(), self.needs.graphs[self.tp])

    def keep_requests(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(
            logitsprocs=SimpleNamespace(all=()), thinking_budget_state_holder=None
        )

    def _dummy_run(self, num_tokens: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        limits = self.vllm_config.scheduler_config
        assert num_tokens == limits.max_num_seqs, "a step of all requests that the layout runs"
        # Hidden states are among what sampling is said to take.
        return allocated(0), allocated(0)

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        allocated(self.needs.activations[self.tp])


RUNNERS = {"v2": Runner, "v1": RunnerV1}

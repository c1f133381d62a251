"""PAT's worker on CUDA and ROCm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from pat_vllm.patches.compat import MakesModelRunner, use_memory_pool
from pat_vllm.patches.replacing import replaced
from pat_vllm.patches.runners import capture_on, graphs_measured_apart, report_weights_memory
from pat_vllm.start.memory_estimate import Measured, kv_cache_bytes
from pat_vllm.weights.experts import what_slows
from pat_vllm.worker.images import clear_deepstack
from pat_vllm.worker.late_memory import (
    check_room,
    measure_buffers,
    measure_graphs,
    staged_by_switches,
)
from pat_vllm.worker.worker import PATWorkerMixin

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pat_vllm.layout import Layout
    from pat_vllm.worker.runtime import LayoutRuntime, ModelRunner


logger = init_logger(__name__)


class PATGPUWorker(PATWorkerMixin, MakesModelRunner, Worker):
    """vLLM's GPU worker with layouts."""

    # Before a first sleep, too: KV memory may be discarded and woken up without any.
    _sleeping_buffers: Mapping[Layout, Mapping[str, torch.Tensor]] = MappingProxyType({})

    def _make_model_runner(self) -> Any:
        """Return None: vLLM's runner for all ranks as one group would never run."""
        return None

    def _make_runner(self, config: VllmConfig) -> ModelRunner:
        # vLLM's own choice of runner, made for the config that the worker holds.
        with replaced(self, "vllm_config", config):
            return super()._make_model_runner()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if (
            tag == "weights"
            and self._active is not self._base
            and self.vllm_config.model_config.enable_cumem_allocator
        ):
            # vLLM asserts that its pool is empty before weights are loaded, but the base layout's
            # are in it. The derived ones go there, too, where sleep mode finds them.
            return use_memory_pool(tag)
        return super()._maybe_get_memory_pool_context(tag)

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        report_weights_memory(
            self.model_runner,
            sum(runtime.runner.model_memory_usage for runtime in self._runtimes.values()),
        )
        if self.rank == 0:
            every = self._runtimes.items()
            for line in what_slows(
                (str(layout), runtime.runner.get_model()) for layout, runtime in every
            ):
                logger.info(line)
        if len(self._runtimes) > 1 and self.vllm_config.model_config.enable_cumem_allocator:
            # What layouts share was freed after its pool was left. vLLM trims a tag's pools when
            # the tag is next used, and would keep this through a sleep.
            with use_memory_pool("weights"):
                pass

    def determine_available_memory(self) -> int:
        """As in vLLM, with what every layout takes to run, and with room for switches."""
        runtimes = list(self._runtimes.values())
        more_room = self._setup.chosen.get("more_room", "")
        if len(runtimes) == 1:
            return super().determine_available_memory()
        # The base layout comes last, because vLLM logs what it measured last.
        measured = [self._measure(runtime) for runtime in reversed(runtimes)]
        if self.cache_config.kv_cache_memory_bytes:
            check_room(self._base, measured[-1].available, more_room)
            return measured[-1].available
        buffers, workspace = measure_buffers(runtimes, self._enter)
        graphs = [0]
        if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
            graphs = measure_graphs(runtimes, self._enter, workspace, self._capture_stream)
        self._enter(self._base)
        # vLLM logs them beside what the base layout's graphs come to.
        self.cudagraph_memory_estimate = graphs[0]
        self.peak_activation_memory += graphs[0]
        migrates = self._setup.options.kv_transfer != "recompute"
        staged = staged_by_switches(self._runtimes) if migrates else 0.0
        self.available_kv_cache_memory_bytes = kv_cache_bytes(
            measured, sum(graphs), buffers, staged, self._weights.staging_bytes
        )
        check_room(self._base, self.available_kv_cache_memory_bytes, more_room)
        return self.available_kv_cache_memory_bytes

    @cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        """On which all layouts' CUDA graphs are captured."""
        return torch.cuda.Stream(self.device)

    def _measure(self, runtime: LayoutRuntime) -> Measured:
        self._enter(runtime)
        with graphs_measured_apart(runtime.runner):
            available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes:
            return Measured(available, activations=0)
        return Measured(available, self.peak_activation_memory)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """As in vLLM, for every layout."""
        with capture_on(self._capture_stream):
            times = super().compile_or_warm_up_model()
        super()._maybe_activate_jit_monitor()
        return times

    def _maybe_activate_jit_monitor(self) -> None:
        """Do nothing until all layouts are warm."""

    def sleep(self, level: int = 1) -> None:
        # A level-2 sleep discards the weights pool, where each layout's model has its buffers. vLLM
        # keeps the buffers of one model only.
        self._sleeping_buffers = {
            layout: {name: b.cpu().clone() for name, b in runtime.runner.model.named_buffers()}
            for layout, runtime in self._runtimes.items()
            if level == 2
        }
        with self._in_base():
            super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        with self._in_base():
            super().wake_up(tags)
        if tags is None or "weights" in tags:
            for layout, buffers in self._sleeping_buffers.items():
                model = self._runtimes[layout].runner.model
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            self._sleeping_buffers = {}
            for runtime in self._runtimes.values():
                clear_deepstack(runtime.runner)

    @contextmanager
    def _in_base(self) -> Iterator[None]:
        """Inside, vLLM's code sees the base layout, as whose the weights are kept and come back."""
        active = self._active
        self._activate(self._base)
        try:
            yield
        finally:
            self._activate(active)

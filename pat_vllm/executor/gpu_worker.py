"""PAT's worker on CUDA and ROCm."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.worker.gpu_worker import Worker

from pat_vllm.executor.worker import PATWorkerMixin

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PATGPUWorker(PATWorkerMixin, Worker):
    """vLLM's GPU worker with layouts."""

    def _make_runner(self, config: VllmConfig) -> Any:
        # vLLM's own choice of runner, made for the config that the worker holds.
        self.vllm_config, engine_config = config, self.vllm_config
        try:
            return self._make_model_runner()
        finally:
            self.vllm_config = engine_config

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if (
            tag == "weights"
            and self._active is not self._base
            and self.vllm_config.model_config.enable_cumem_allocator
        ):
            # vLLM asserts that its pool is empty when weights are loaded; the base layout's are
            # in it. The derived ones belong there too, for sleep mode to find them.
            return get_mem_allocator_instance().use_memory_pool(tag=tag)
        return super()._maybe_get_memory_pool_context(tag)

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        # vLLM sizes the KV cache by what the active layout's weights take: count all layouts'.
        self.model_runner.model_memory_usage = sum(
            runtime.runner.model_memory_usage for runtime in self._runtimes.values()
        )

    def sleep(self, level: int = 1) -> None:
        # vLLM keeps the buffers of the active layout's model through a level-2 sleep, which
        # discards the weights pool; each layout's model has its own there.
        self._sleeping_buffers = {
            layout: {name: b.cpu().clone() for name, b in runtime.runner.model.named_buffers()}
            for layout, runtime in self._runtimes.items()
            if level == 2
        }
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            for layout, buffers in self._sleeping_buffers.items():
                model = self._runtimes[layout].runner.model
                for name, buffer in model.named_buffers():
                    buffer.copy_(buffers[name])
            self._sleeping_buffers = {}

"""PAT's worker on CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.cpu_worker import CPUWorker

from pat_vllm.patches.drafts import verify_sampled_drafts
from pat_vllm.worker.late_memory import staged_by_switches
from pat_vllm.worker.worker import PATWorkerMixin

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pat_vllm.worker.runtime import ModelRunner


class PATCPUWorker(PATWorkerMixin, CPUWorker):
    """vLLM's CPU worker with layouts."""

    def _make_runner(self, config: VllmConfig) -> ModelRunner:
        if config.use_v2_model_runner:
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner as RunnerV2

            return RunnerV2(config, self.device)
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner as RunnerV1

        if config.speculative_config is not None:
            verify_sampled_drafts()
        return RunnerV1(config, self.device)

    def determine_available_memory(self) -> int:
        """As in vLLM, with room for switches."""
        available = super().determine_available_memory()
        if self.cache_config.kv_cache_memory_bytes:
            return available
        return int(available / (1 + staged_by_switches(self._runtimes)))

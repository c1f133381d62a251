"""The drafter of Model Runner V2: an n-gram drafter that looks into earlier responses, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from pat_vllm.worker.drafters.matches import Matches

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

    from pat_vllm.drafts.shelf import Shelf


class SuffixSpeculator(NgramGPUSpeculator):
    """For Model Runner V2, whose drafts are made on the device and stay there."""

    def __init__(self, runner: RunnerV2, shelf: Shelf) -> None:
        super().__init__(runner.vllm_config, runner.device, runner.req_states)
        self._matches = Matches(runner, shelf, self.min_n)
        self.drafts = self._matches.drafts
        self.forget = self._matches.forget

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """As vLLM's; returns int64 [requests, k]."""
        if dummy_run:
            return self.drafts[: input_batch.num_reqs]
        return self._matches.look_up(input_batch, num_sampled, last_sampled)

"""The drafter of Model Runner V2: an n-gram drafter that looks into earlier responses, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from pat_vllm.kernels.suffix_match import draft, score_blocks

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

    from pat_vllm.drafts.shelf import RowIds, Shelf


class SuffixSpeculator(NgramGPUSpeculator):
    """For Model Runner V2, whose drafts are made on the device and stay there."""

    def __init__(self, runner: RunnerV2, shelf: Shelf) -> None:
        super().__init__(runner.vllm_config, runner.device, runner.req_states)
        self._shelf = shelf
        self._longest_own = self.req_states.all_token_ids.gpu.shape[1]
        self.scratch = self._scratch(score_blocks(self._longest_own, 0))
        self._others = torch.zeros((self.max_num_reqs, 2), dtype=torch.int64, device=runner.device)
        self._longest_other = 0
        self._known: tuple[int, list[str]] = (-1, [])
        self._texts: dict[RowIds, torch.Tensor] = {}

    def _scratch(self, blocks: int) -> torch.Tensor:
        size = (self.max_num_reqs, blocks)
        return torch.zeros(size, dtype=torch.int64, device=self.device)

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
        drafts = self.drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts
        self._look_up(input_batch.req_ids)
        draft(
            self.req_states.all_token_ids.gpu,
            input_batch.idx_mapping,
            self.req_states.total_len.gpu,
            num_sampled,
            last_sampled.view(-1),
            self._others,
            self._longest_other,
            self.scratch,
            drafts,
            self.min_n,
        )
        return drafts

    def forget(self) -> None:
        """Give back what the device has of earlier responses; the next step brings them again."""
        self._known, self._texts = (-1, []), {}

    def _look_up(self, request_ids: Sequence[str]) -> None:
        """Have the device know the rows of a step's requests, if they are others."""
        known = (self._shelf.version, list(request_ids))
        if known == self._known:
            return
        self._known = known
        of_requests = [self._shelf.ids_of(request_id) for request_id in request_ids]
        texts: dict[RowIds, torch.Tensor] = {}
        for request_id, ids in zip(request_ids, of_requests, strict=True):
            if ids in self._texts:
                texts[ids] = self._texts[ids]
            elif ids not in texts:
                texts[ids] = self._on_device(self._shelf.text_of(request_id))
        self._texts = texts
        rows = [(texts[ids].data_ptr(), len(texts[ids])) for ids in of_requests]
        self._others[: len(rows)] = self._on_device(np.array(rows, np.int64).reshape(-1, 2))
        self._longest_other = max((length for _, length in rows), default=0)
        blocks = score_blocks(self._longest_own, self._longest_other)
        if blocks > self.scratch.shape[1]:
            self.scratch = self._scratch(blocks)

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        """A copy, which the device has before its next kernel."""
        host = torch.from_numpy(values)
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

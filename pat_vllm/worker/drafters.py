"""Drafters that look into earlier responses, too, in the place of vLLM's n-gram drafters.

One for each of vLLM's model runners. All ranks of a replica draft the same: they have the same
tokens, and the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from pat_vllm.config import pat_config
from pat_vllm.drafts.suffix import draft
from pat_vllm.patches.runners import is_v2
from pat_vllm.speculation import looks_into_earlier_responses

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    from pat_vllm.drafts.shelf import RowIds, Shelf


def install_drafter(runner: RunnerV1 | RunnerV2, shelf: Shelf) -> None:
    """Give a runner the drafter that looks into `shelf`, if its engine keeps earlier responses."""
    speculative, v2 = runner.speculative_config, is_v2(runner)
    if speculative is None or not pat_config(runner.vllm_config).draft_history_bytes:
        return
    if not looks_into_earlier_responses(speculative.method, v2):
        return
    if v2:
        runner.speculator = _speculator_class()(runner, shelf)
    else:
        runner.drafter = SuffixProposer(runner, shelf)


class SuffixProposer(NgramProposer):
    """For Model Runner V1, whose drafts are made on the host."""

    def __init__(self, runner: RunnerV1, shelf: Shelf) -> None:
        self._batch = lambda: runner.input_batch.req_ids
        self._shelf = shelf
        super().__init__(runner.vllm_config)
        self._out = np.empty(self.k, np.int32)
        nothing = self._out[:0]
        draft(nothing, nothing, self.min_n, nothing)  # compiled here

    def batch_propose(
        self,
        num_requests: int,
        valid_ngram_requests: Sequence[int],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        k: int,
    ) -> list[list[int]]:
        """As vLLM's, by request: at most `k` draft tokens, none beyond the longest context."""
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        request_ids = self._batch() if valid_ngram_requests else []
        for index in valid_ngram_requests:
            size = int(num_tokens_no_spec[index])
            out = self._out[: min(k, self.max_model_len - size)]
            others = self._shelf.text_of(request_ids[index])
            count, _ = draft(token_ids_cpu[index, :size], others, self.min_n, out)
            drafts[index] = out[:count].tolist()
        return drafts


def _speculator_class() -> type:
    """That for Model Runner V2. Made when asked for: Triton is not everywhere."""
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    from pat_vllm.kernels.suffix import draft as draft_on_device
    from pat_vllm.kernels.suffix import score_blocks

    class SuffixSpeculator(NgramGPUSpeculator):
        """For Model Runner V2, whose drafts are made on the device and stay there."""

        def __init__(self, runner: RunnerV2, shelf: Shelf) -> None:
            super().__init__(runner.vllm_config, runner.device, runner.req_states)
            self._shelf = shelf
            self.scratch = self._scratch(score_blocks(self.max_model_len, 0))
            self._others = torch.zeros(
                (self.max_num_reqs, 2), dtype=torch.int64, device=runner.device
            )
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
            draft_on_device(
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

        def _look_up(self, request_ids: Sequence[str]) -> None:
            """Have the device know the rows of a step's requests, if they are others."""
            known = (self._shelf.version, list(request_ids))
            if known == self._known:
                return
            self._known = known
            of_requests = [self._shelf.ids_of(one) for one in request_ids]
            texts: dict[RowIds, torch.Tensor] = {}
            for one, ids in zip(request_ids, of_requests, strict=True):
                if ids in self._texts:
                    texts[ids] = self._texts[ids]
                elif ids not in texts:
                    texts[ids] = self._on_device(self._shelf.text_of(one))
            self._texts = texts
            rows = [(texts[ids].data_ptr(), len(texts[ids])) for ids in of_requests]
            self._others[: len(rows)] = self._on_device(np.array(rows, np.int64).reshape(-1, 2))
            self._longest_other = max((length for _, length in rows), default=0)
            blocks = score_blocks(self.max_model_len, self._longest_other)
            if blocks > self.scratch.shape[1]:
                self.scratch = self._scratch(blocks)

        def _on_device(self, values: np.ndarray) -> torch.Tensor:
            """A copy, which the device has before its next kernel."""
            host = torch.from_numpy(values)
            if self.device.type == "cuda":
                host = host.pin_memory()
            return host.to(self.device, non_blocking=True)

    return SuffixSpeculator

"""The drafter of Model Runner V1: an n-gram drafter that looks into earlier responses, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from pat_vllm.drafts.suffix import draft

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    from pat_vllm.drafts.shelf import Shelf


class SuffixProposer(NgramProposer):
    """For Model Runner V1, whose drafts are made on the host."""

    def __init__(self, runner: RunnerV1, shelf: Shelf) -> None:
        self._runner = runner
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
        """As vLLM's, by request: at most `k` draft tokens, none beyond the longest context, and no
        more than the match has. Behind a short match few are right, and each costs a step's time.
        """
        drafts: list[list[int]] = [[] for _ in range(num_requests)]
        for index in valid_ngram_requests:
            request_id = self._runner.input_batch.req_ids[index]
            size = int(num_tokens_no_spec[index])
            room = self._room(request_id, size, k)
            if room <= 0:
                continue  # looking through texts takes time
            out = self._out[:room]
            others = self._shelf.text_of(request_id)
            count, match = draft(token_ids_cpu[index, :size], others, self.min_n, out)
            drafts[index] = out[: min(count, match)].tolist()
        return drafts

    def _room(self, request_id: str, size: int, k: int) -> int:
        """The most draft tokens for a request that has `size` tokens.

        Not so many that the token behind them is the first that may end the request: vLLM forbids
        that, as `min_tokens` says of a token which comes at once.
        """
        k = min(k, self.max_model_len - size)
        request = self._runner.requests[request_id]
        least = request.sampling_params.min_tokens if request.sampling_params else 0
        left = least - (size - request.num_prompt_tokens)
        return min(k, left - 1) if left > 0 else k

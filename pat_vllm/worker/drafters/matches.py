"""What followed requests' last tokens elsewhere, looked up on the device, for Model Runner V2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pat_vllm.kernels.suffix_match import BITS, draft, score_blocks

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

    from pat_vllm.drafts.shelf import RowIds, Shelf


class Matches:
    """The longest matches of requests' last tokens, in their own text and in earlier responses.

    Attributes:
        drafts: what followed them, int64 [requests of a step at most, longest draft].
    """

    def __init__(self, runner: RunnerV2, shelf: Shelf, shortest: int) -> None:
        """`shortest`: tokens of a match below which nothing is drafted."""
        self._states, self._shelf, self._shortest = runner.req_states, shelf, shortest
        self._device, self._most = runner.device, runner.max_num_reqs
        self._longest_own = self._states.all_token_ids.gpu.shape[1]
        self._scores = self._room(score_blocks(self._longest_own, 0))
        self._others = self._room(2)
        self._longest_other = 0
        self._known: tuple[int, list[str]] = (-1, [])
        self._texts: dict[RowIds, torch.Tensor] = {}
        self.drafts = self._room(runner.num_speculative_steps)

    def _room(self, columns: int) -> torch.Tensor:
        size = (self._most, columns)
        return torch.zeros(size, dtype=torch.int64, device=self._device)

    def look_up(
        self, input_batch: Any, num_sampled: torch.Tensor, last_sampled: torch.Tensor
    ) -> torch.Tensor:
        """The drafts of a step's requests, int64 [requests, longest draft].

        Where there are none, the last token stands.
        """
        drafts = self.drafts[: input_batch.num_reqs]
        self._bring_texts(input_batch.req_ids)
        draft(
            self._states.all_token_ids.gpu,
            input_batch.idx_mapping,
            self._states.total_len.gpu,
            num_sampled,
            last_sampled.view(-1),
            self._others,
            self._longest_other,
            self._scores,
            drafts,
            self._shortest,
        )
        return drafts

    def lengths(self, requests: int) -> torch.Tensor:
        """Tokens of the matches of the last `look_up`, int64 [requests]; 0: there was none."""
        blocks = score_blocks(self._longest_own, self._longest_other)
        return self._scores[:requests, :blocks].amax(dim=1) >> BITS.value

    def forget(self) -> None:
        """Give back what the device has of earlier responses; the next step brings them again."""
        self._known, self._texts = (-1, []), {}

    def _bring_texts(self, request_ids: Sequence[str]) -> None:
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
                texts[ids] = on_device(self._shelf.text_of(request_id), self._device)
        self._texts = texts
        rows = [(texts[ids].data_ptr(), len(texts[ids])) for ids in of_requests]
        found = np.array(rows, np.int64).reshape(-1, 2)
        self._others[: len(rows)] = on_device(found, self._device)
        self._longest_other = max((length for _, length in rows), default=0)
        blocks = score_blocks(self._longest_own, self._longest_other)
        if blocks > self._scores.shape[1]:
            self._scores = self._room(blocks)


def on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy, which the device has before its next kernel."""
    host = torch.from_numpy(values)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)

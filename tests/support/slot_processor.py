"""A logits processor of Model Runner V2 as users write them; see `logits_processors.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from tests.support.counting import EVERY, FORCED
from tests.support.logits_processors import place_of

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class SlotCounter(LogitsProcessor):
    """Counts steps by slot, in a dict or in a tensor of vLLM's with a copy on the device."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self.req_states = req_states
        self.prefill_len = req_states.prefill_len
        self.counts: dict[int, int] = {}
        self.shared = UvaBackedTensor(req_states.max_num_reqs, dtype=torch.int32)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        place = place_of(sampling_params)
        self.counts.pop(req_idx, None)
        if place == "dict":
            self.counts[req_idx] = 0
        self.shared.np[req_idx] = 1 if place == "array" else 0
        return place is not None

    def apply_staged_writes(self) -> None:
        self.shared.copy_to_uva()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        for row, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            # A part of a prompt samples nothing.
            if ctx.pos[row] + 1 < self.prefill_len.np[slot]:
                continue
            if slot in self.counts:
                count = self.counts[slot] = self.counts[slot] + 1
            elif self.shared.np[slot]:
                count = int(self.shared.gpu[slot])
                self.shared.np[slot] += 1
            else:
                continue
            if count % EVERY == 0:
                logits[row] = float("-inf")
                logits[row, FORCED] = 0.0
        return logits

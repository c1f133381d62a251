"""Logits processors as users write them, which keep what no token tells.

They count the steps of a request, and force a token at every `EVERY`th. The request asks for where
they keep the count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

from tests.support.counting import EVERY, FORCED, PLACES

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


def place_of(params: SamplingParams) -> str | None:
    """Where a request's steps are to be counted, if they are."""
    place: str | None = (params.extra_args or {}).get("count_in")
    return place


@dataclass
class Nested:
    """Something of the user's own that has a row for each request."""

    counts: torch.Tensor


class StepCounter(LogitsProcessor):
    """Counts steps by row, in another place for each request; and what follows from the rows."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        rows = vllm_config.scheduler_config.max_num_seqs
        self.order = np.arange(rows)
        self.places: list[str | None] = [None] * rows
        self.counts: dict[int, int] = {}
        self.array = np.zeros(rows, dtype=np.int64)
        self.listed = [0] * rows
        self.nested = Nested(torch.zeros(rows, dtype=torch.int32))
        self.due: list[int] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        assert (self.order == np.arange(len(self.order))).all()
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.set(row, None)
        for row, params, _, _ in batch_update.added:
            place = place_of(params)
            self.set(row, place if place in PLACES else None)
        for row, other, direction in batch_update.moved:
            moved, back = self.get(row), self.get(other)
            self.set(row, *(back if direction == MoveDirectionality.SWAP else (None,)))
            self.set(other, *moved)

    def get(self, row: int) -> tuple[str | None, int]:
        place = self.places[row]
        counts: dict[str | None, Any] = {
            None: [0] * len(self.places),
            "dict": self.counts,
            "array": self.array,
            "list": self.listed,
            "nested": self.nested.counts,
        }
        return place, int(counts[place][row])

    def set(self, row: int, place: str | None, count: int = 0) -> None:
        self.places[row] = place
        self.counts.pop(row, None)
        if place == "dict":
            self.counts[row] = count
        self.array[row] = count * (place == "array")
        self.listed[row] = count * (place == "list")
        self.nested.counts[row] = count * (place == "nested")

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row in range(len(logits)):
            place, count = self.get(row)
            if place is None:
                continue
            self.set(row, place, count + 1)
            if (count + 1) % EVERY == 0:
                logits[row] = float("-inf")
                logits[row, FORCED] = 0.0
        return logits


class _CountsItsCalls:
    """Of one request: a count, beside the tokens that it is given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert len(output) == self.calls, "it no longer sees the request's own tokens"
        self.calls += 1
        if self.calls % EVERY:
            return logits
        forced = torch.full_like(logits, float("-inf"))
        forced[FORCED] = 0.0
        return forced


class OfEachRequest(AdapterLogitsProcessor):
    """vLLM's adapter for processors of single requests."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        return _CountsItsCalls() if place_of(params) == "adapter" else None

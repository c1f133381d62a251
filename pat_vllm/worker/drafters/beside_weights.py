"""Drafts from text in the place of those of a drafter with weights, where more are accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pat_vllm.worker.drafters.matches import Matches, on_device
from pat_vllm.worker.drafters.sources import DraftSources

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

    from pat_vllm.drafts.shelf import Shelf

_SHORTEST = 8
"""Tokens of a match behind which text may draft. Behind a shorter one few drafts are right."""
_COUNTS = slice(4, 7)
"""Of what vLLM proposes by, behind the batch: the tokens that each request was given, the drafts of
it that were refused, and the last token of each request state."""


class TextBesideWeights:
    """For Model Runner V2. The drafter makes its passes in any case, so that its KV is whole."""

    def __init__(self, runner: RunnerV2, shelf: Shelf) -> None:
        self._matches = Matches(runner, shelf, _SHORTEST)
        self._sources = DraftSources(
            runner.max_num_reqs, runner.num_speculative_steps, runner.device
        )

    def propose(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """For `replace`: what the drafter proposes, with drafts from text for some requests."""

        @torch.inference_mode()
        def call(input_batch: Any, *given: Any, **options: Any) -> torch.Tensor:
            drafts = original(input_batch, *given, **options)
            if options.get("dummy_run") or not options.get("num_speculative_tokens"):
                return drafts
            num_sampled, num_rejected, last_sampled = given[_COUNTS]
            self._begin(input_batch)
            of_text = self._matches.look_up(input_batch, num_sampled, last_sampled)
            match = self._matches.lengths(len(of_text))
            states = input_batch.idx_mapping.long()
            takes_text = self._sources.choose(states, match, num_sampled, num_rejected)
            drafts.copy_(torch.where(takes_text[:, None], of_text, drafts))
            return drafts

        return call

    def _begin(self, input_batch: Any) -> None:
        states = input_batch.idx_mapping_np[: input_batch.num_reqs].tolist()
        if new := self._sources.begin(input_batch.req_ids[: len(states)], states):
            self._sources.reset(on_device(np.array(new, np.int64), input_batch.idx_mapping.device))

    def forget(self) -> None:
        """All requests have left."""
        self._sources.forget()
        self._matches.forget()

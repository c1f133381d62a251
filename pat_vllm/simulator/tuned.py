"""Draft lengths as somebody would set them who knows a workload's steps and drafts. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import StepShape
from pat_vllm.simulator.guesses import GuessedTokens
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import Truth
from pat_vllm.speculation import Schedule

DRAFT_LENGTHS = (0, 1, 2, 4, 7)
"""Those that an engine with `num_speculative_tokens` 7 keeps ready."""

_MANY = 512
"""Steps whose mean time a tuned schedule knows."""


def tuned_schedule(
    truth: Truth,
    layout: Layout,
    most: int,
    batches: Sequence[LengthTrace],
    draft_lengths: Sequence[int] = DRAFT_LENGTHS,
) -> Schedule:
    """The draft length with least time per token, by batch size, for a layout that knows how many
    drafts will be accepted, and the mean context of the tokens of these batches."""
    lengths = np.array([length for batch in batches for length in batch.lengths])
    prompts = np.array([tokens for batch in batches for tokens in batch.num_prompt_tokens])
    context = int((lengths * (prompts + lengths / 2)).sum() / lengths.sum())
    each = [
        GuessedTokens.of(batch).drafting(
            np.arange(len(batch)), np.zeros(len(batch), np.int64), draft_lengths
        )
        for batch in batches
    ]
    tokens = np.mean([one.tokens for one in each], axis=0).tolist()

    def best(batch: int) -> int:
        def per_token(index: int) -> float:
            k = draft_lengths[index]
            shape = StepShape(
                batch, batch * context, context, busy=layout.replicas, drafts=batch * k, k=k
            )
            return truth.step_seconds(layout, shape, 0.0, _MANY) / float(tokens[index])

        return draft_lengths[min(range(len(draft_lengths)), key=per_token)]

    # vLLM's tables name few batch sizes, too: powers of two.
    bounds = [2**i for i in range(int(math.log2(most)) + 1)]
    ends = [*(bound * 2 - 1 for bound in bounds[:-1]), most]
    return tuple((first, last, best(first)) for first, last in zip(bounds, ends, strict=True))

"""What drafts of each length gave, and the best table of draft lengths for a layout. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.reporting import DraftSample


@dataclass(frozen=True)
class Drafted:
    """Batches that were served with one draft length.

    Attributes:
        length: the draft length.
        tokens: generated.
        drafted, accepted: draft tokens verified, and accepted.
    """

    length: int
    tokens: int
    drafted: int
    accepted: int

    @classmethod
    def of(cls, length: int, tokens: int, samples: Iterable[DraftSample]) -> Drafted:
        """Of a batch that generated so many tokens."""
        samples = tuple(samples)
        drafted = sum(one.drafted for one in samples)
        return cls(length, tokens, drafted, sum(one.accepted for one in samples))

    @property
    def steps(self) -> int:
        """Steps of a request, over all of them: each gave a token beside the accepted ones."""
        return self.tokens - self.accepted


def together(batches: Iterable[Drafted]) -> dict[int, Drafted]:
    """By draft length."""
    sums: dict[int, Drafted] = {}
    for one in batches:
        had = sums.get(one.length, Drafted(one.length, 0, 0, 0))
        sums[one.length] = Drafted(
            one.length,
            had.tokens + one.tokens,
            had.drafted + one.drafted,
            had.accepted + one.accepted,
        )
    return sums


def accepted_share(batches: Iterable[Drafted]) -> float:
    """Accepted share of the draft tokens of all of them; 0 without any."""
    batches = tuple(batches)
    return sum(one.accepted for one in batches) / max(1, sum(one.drafted for one in batches))


def tuned_table(
    model: StepTimeModel,
    layout: Layout,
    most: int,
    context: float,
    gave: Sequence[Drafted],
) -> list[tuple[int, int, int]]:
    """vLLM's `num_speculative_tokens_per_batch_size` with the least time per token of a request.

    Args:
        model: of the profile's step times, uncorrected.
        most: requests that a replica runs at once.
        context: of a request, tokens.
        gave: what each draft length gave, 0 included; its true acceptance.
    """
    batch = np.arange(1, most + 1, dtype=np.float64)
    per_token = np.array(
        [
            model.seconds(
                layout,
                batch,
                batch * context,
                context,
                busy=layout.replicas,
                drafts=batch * (one.drafted / one.steps),
                k=one.length,
            )
            * (one.steps / one.tokens)
            for one in gave
        ]
    )
    lengths = [gave[best].length for best in per_token.argmin(axis=0)]
    table = []
    for length, sizes in itertools.groupby(enumerate(lengths, 1), key=lambda pair: pair[1]):
        numbers = [number for number, _ in sizes]
        table.append((numbers[0], numbers[-1], length))
    return table

"""The policy and the published figures of the paper, arXiv 2605.23945. Pure.

The figures come from public summaries of the paper. The policy is a reading of its text: low tp
while requests are aligned, then one switch to the tp that its latency predictor finds best, when
the predicted saving exceeds the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import SETTLE_SECONDS, Policy
from pat_vllm.predictor.state import LiveState
from pat_vllm.profiling.profile import StepShape
from pat_vllm.reporting import SwitchReport

SWITCH_SECONDS = 5.52
"""A switch on the paper's hardware, seconds."""
GENERATION_SHARE = 0.272 / 0.346
"""Share of generation in an iteration. Derived: the paper's iteration takes 27.2% less when its
generation takes 34.6% less, which holds if nothing else changes and generation is 0.786 of it."""


BATCH = 128
"""The paper's batch. Whether it counts responses, or prompts with several samples each, it does not
say; responses are assumed."""


@dataclass(frozen=True)
class PaperSetting:
    """One experiment of the paper, and what it published of it.

    Attributes:
        title: for tables.
        model: name in `model_size.MODEL_SHAPES`.
        gpu: name in `gpus.GPUS`.
        ranks: GPUs; nodes have eight, and tp stays within a node.
        max_tokens: longest response.
        speedup: end to end, as published; None where it was not.
        generation: change of the generation time, as published.
    """

    title: str
    model: str
    gpu: str
    ranks: int
    max_tokens: int
    speedup: float | None = None
    generation: float | None = None


SETTINGS = (
    PaperSetting("Llama-3.1-8B, 8 x H100, 6K", "llama-3.1-8b", "H100", 8, 6 * 1024),
    PaperSetting("Llama-3.1-8B, 8 x H100, 8K", "llama-3.1-8b", "H100", 8, 8 * 1024),
    PaperSetting("Llama-3.1-8B, 8 x H100, 16K", "llama-3.1-8b", "H100", 8, 16 * 1024),
    PaperSetting("Llama-3.1-8B, 8 x H100, 24K", "llama-3.1-8b", "H100", 8, 24 * 1024, 1.37, -0.346),
    PaperSetting("Qwen3-14B, 8 x H100, 8K", "qwen3-14b", "H100", 8, 8 * 1024),
    PaperSetting("Qwen3-14B, 8 x H100, 16K", "qwen3-14b", "H100", 8, 16 * 1024, 1.29, -0.320),
    PaperSetting("Qwen3-14B, 8 x H100, 24K", "qwen3-14b", "H100", 8, 24 * 1024),
    PaperSetting("Llama-3.1-8B, 8 x A40, 16K", "llama-3.1-8b", "A40", 8, 16 * 1024, 1.27),
    PaperSetting("Qwen3-14B, 16 x A40, 16K", "qwen3-14b", "A40", 16, 16 * 1024, 1.18),
)


class PaperPolicy(Policy):
    """At most one switch per batch.

    It begins in the layout whose step is fastest with the whole batch live. Whenever a response
    has ended it compares step times of the layouts at the present load, and switches to the
    fastest when

        (step now - step then) * expected remaining tokens  >  cost.

    What the paper does for the length estimate is not known. Here it is the mean remaining length
    of a live request, given what it has generated, under the true distribution of lengths: more
    than an offline profile on synthetic shapes can know.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        step: Callable[[Layout, StepShape], float],
        lengths: ArrayLike,
        *,
        requests: int,
        prompt: int,
        cost: float = SWITCH_SECONDS,
        home: Layout | None = None,
    ) -> None:
        """Plan for batches of `requests` with prompts of `prompt` tokens.

        Args:
            step: seconds of a step, by layout.
            lengths: a large sample of the workload's response lengths, tokens.
            cost: of a switch, seconds.
            home: where a batch begins; None: where its first steps are fastest.
        """
        self._layouts = tuple(layouts)
        self._step_seconds = step
        self._lengths = np.sort(np.asarray(lengths, dtype=np.float64))
        # Suffix sums, for means over all that are longer than a request is now.
        self._longer = np.append(np.cumsum(self._lengths[::-1])[::-1], 0.0)
        self._cost = cost
        self._switched = False
        self._live = -1
        context = int(requests * (prompt + self._lengths.mean() / 2))
        longest = prompt + int(self._lengths.mean())
        self.home = home or min(
            self._layouts, key=lambda layout: self._step(layout, requests, context, longest)
        )

    def choose(self, state: LiveState) -> Layout:
        settled = state.quiet >= SETTLE_SECONDS
        if self._switched or not settled or state.num_seqs == self._live:
            return state.layout
        self._live = state.num_seqs
        requests = state.requests()
        context, longest = int(requests.context.sum()), int(requests.context.max())
        times = {
            layout: self._step(layout, state.num_seqs, context, longest) for layout in self._layouts
        }
        best = min(times, key=times.__getitem__)
        remaining = float(self.remaining(requests.num_output_tokens).mean())
        saving = (times[state.layout] - times[best]) * remaining
        return best if saving > self._cost else state.layout

    def remaining(self, generated: ArrayLike) -> np.ndarray:
        """Mean tokens to come for responses that have `generated` tokens so far."""
        generated = np.asarray(generated, dtype=np.float64)
        first = np.searchsorted(self._lengths, generated, side="right")
        count = len(self._lengths) - first
        return np.where(count > 0, self._longer[first] / np.maximum(count, 1) - generated, 0.0)

    def switched(self, report: SwitchReport) -> None:
        self._switched = report.reason != "idle"

    def idle(self, now: float) -> None:
        self._switched = False
        self._live = -1

    def _step(self, layout: Layout, live: int, context: int, longest: int) -> float:
        """Step time with the requests spread evenly."""
        return self._step_seconds(
            layout,
            StepShape(
                -(-live // layout.replicas),
                -(-context // layout.replicas),
                longest,
                busy=min(live, layout.replicas),
            ),
        )

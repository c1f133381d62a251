"""Steps and switches that take other times than a profile says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pat_vllm.layout import Layout
from pat_vllm.predictor.cost import Number
from pat_vllm.profiling.profile import StepShape
from pat_vllm.simulator.truth import Truth


@dataclass(frozen=True)
class ScaledTruth:
    """Steps take `steps[layout]` times as long as in `base`, switches `switches` times.

    For a policy whose profile is wrong.
    """

    base: Truth
    steps: Mapping[Layout, float] = field(default_factory=dict)
    switches: float = 1.0

    def step_seconds(self, layout: Layout, shape: StepShape, now: float, steps: int = 1) -> float:
        return self.steps.get(layout, 1.0) * self.base.step_seconds(layout, shape, now, steps)

    def switch_seconds(
        self, source: Layout, target: Layout, live: Number, tokens: Number
    ) -> Number:
        return self.switches * self.base.switch_seconds(source, target, live, tokens)

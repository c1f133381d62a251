"""Machines that take other times than a profile says, for tests of the predictor."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.simulator.ground_truth import GroundTruth
from pat_vllm.layout import Layout
from pat_vllm.predictor.cost import Number
from pat_vllm.profile import StepShape


@dataclass(frozen=True)
class DriftingTruth:
    """A machine that slows down: steps take `1 + slowdown` times as long after `over` seconds,
    less before, in proportion, and no more after."""

    base: GroundTruth
    slowdown: float
    over: float

    def step_seconds(self, layout: Layout, shape: StepShape, now: float) -> float:
        drift = 1 + self.slowdown * min(1.0, max(0.0, now) / self.over)
        return drift * self.base.step_seconds(layout, shape, now)

    def switch_seconds(
        self, source: Layout, target: Layout, live: Number, tokens: Number
    ) -> Number:
        return self.base.switch_seconds(source, target, live, tokens)


@dataclass(frozen=True)
class ScaledSwitches:
    """A machine whose switches take `factor` times as long as in `base`."""

    base: GroundTruth
    factor: float

    def step_seconds(self, layout: Layout, shape: StepShape, now: float) -> float:
        return self.base.step_seconds(layout, shape, now)

    def switch_seconds(
        self, source: Layout, target: Layout, live: Number, tokens: Number
    ) -> Number:
        return self.factor * self.base.switch_seconds(source, target, live, tokens)

"""What really happens in a simulated engine, whatever its policy believes. Pure."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Protocol

from pat_vllm.layout import Layout
from pat_vllm.predictor.cost import CostModel
from pat_vllm.profiling.profile import Profile, StepShape


class Truth(Protocol):
    """Durations. They depend on the arguments only, so that a replay repeats them."""

    def step_seconds(self, tp: int, shape: StepShape, now: float) -> float:
        """Seconds of one step of one replica that starts at `now`."""
        ...

    def switch_seconds(self, source: Layout, target: Layout, live: int, tokens: int) -> float:
        """Seconds of a switch that carries `live` requests with the KV of `tokens` tokens."""
        ...


class ProfileTruth:
    """An engine that behaves as a profile says; models of its own, which no policy corrects.

    KV is always migrated: recomputing some requests is not simulated.
    """

    def __init__(self, profile: Profile) -> None:
        from pat_vllm.predictor.step_time import StepTimeModel

        self._steps = StepTimeModel.fit(profile)
        self._switches = CostModel.of(profile, mode="migrate")

    def step_seconds(self, tp: int, shape: StepShape, now: float) -> float:
        return self._steps.step(tp, shape)

    def switch_seconds(self, source: Layout, target: Layout, live: int, tokens: int) -> float:
        return self._switches.seconds(source, target, live, tokens)


@dataclass(frozen=True)
class ScaledTruth:
    """Steps take `steps[tp]` times as long as in `base`, switches `switches` times.

    For a policy whose profile is wrong.
    """

    base: Truth
    steps: Mapping[int, float] = field(default_factory=dict)
    switches: float = 1.0

    def step_seconds(self, tp: int, shape: StepShape, now: float) -> float:
        return self.steps.get(tp, 1.0) * self.base.step_seconds(tp, shape, now)

    def switch_seconds(self, source: Layout, target: Layout, live: int, tokens: int) -> float:
        return self.switches * self.base.switch_seconds(source, target, live, tokens)


@dataclass(frozen=True)
class NoisyTruth:
    """Log-normal noise on step times: `sigma` is its standard deviation, as a fraction.

    A chunk of steps shares its noise, which makes the noise of a run larger than independent
    steps would.
    """

    base: Truth
    sigma: float
    seed: int = 0

    def step_seconds(self, tp: int, shape: StepShape, now: float) -> float:
        # From a digest and not from a generator: the same step takes the same time in a replay.
        digest = zlib.crc32(f"{self.seed} {tp} {shape}".encode())
        deviate = NormalDist(0.0, self.sigma).inv_cdf((digest + 0.5) / 2**32)
        return self.base.step_seconds(tp, shape, now) * math.exp(deviate)

    def switch_seconds(self, source: Layout, target: Layout, live: int, tokens: int) -> float:
        return self.base.switch_seconds(source, target, live, tokens)


@dataclass(frozen=True)
class DriftingTruth:
    """A machine that slows down: steps take `1 + slowdown` times as long after `over` seconds,
    less before, in proportion, and no more after."""

    base: Truth
    slowdown: float
    over: float

    def step_seconds(self, tp: int, shape: StepShape, now: float) -> float:
        drift = 1 + self.slowdown * min(1.0, max(0.0, now) / self.over)
        return drift * self.base.step_seconds(tp, shape, now)

    def switch_seconds(self, source: Layout, target: Layout, live: int, tokens: int) -> float:
        return self.base.switch_seconds(source, target, live, tokens)


@dataclass(frozen=True)
class FixedSwitches:
    """Every switch that carries requests takes `seconds`; the way home of an idle engine takes
    what it takes in `base`."""

    base: Truth
    seconds: float

    def step_seconds(self, tp: int, shape: StepShape, now: float) -> float:
        return self.base.step_seconds(tp, shape, now)

    def switch_seconds(self, source: Layout, target: Layout, live: int, tokens: int) -> float:
        if source == target or not live:
            return self.base.switch_seconds(source, target, live, tokens)
        return self.seconds

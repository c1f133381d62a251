"""The simulator, calibrated with what was measured. Pure.

It replays the very batches on the engine's own profile, whose step times are scaled until the
static layouts take as long as they really took.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.truths import ScaledTruth
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import Policy, StayPolicy
from pat_vllm.profiling.profile import Profile
from pat_vllm.reporting import SwitchReport
from pat_vllm.simulator.replay import simulate
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import Truth


@dataclass(frozen=True)
class CalibratedSimulator:
    """The simulator, calibrated with the measured times of a workload.

    Attributes:
        factors: measured over simulated time of the static layouts, before calibration.
        switch_factor: measured over predicted seconds of PAT's switches.
    """

    truth: Truth
    profile: Profile
    layouts: tuple[Layout, ...]
    factors: Mapping[Layout, float]
    switch_factor: float = 1.0

    def seconds(self, trace: LengthTrace, policy: Policy) -> float:
        """Until the last response."""
        run = simulate(trace, policy, self.truth, self.profile, chunk=_FEW_STEPS)
        return run.generation_seconds


_FEW_STEPS = 4
"""Simulated at once, so that a short stay in a layout is as short as it was."""


def calibrate_simulator(
    profiled: Truth,
    profile: Profile,
    traces: Sequence[LengthTrace],
    static: Mapping[Layout, Sequence[float]],
    switches: Sequence[SwitchReport] = (),
) -> CalibratedSimulator:
    """Scale step times by layout so that static batches take as long as measured.

    Args:
        profiled: durations as the engine's profile has them.
        static: by layout, measured seconds of each trace.
        switches: measured ones, of whose stalls the simulator's are made the equal.
    """
    predicted = sum(
        profiled.switch_seconds(s.source, s.target, s.num_seqs, s.tokens) for s in switches
    )
    real = sum(s.seconds - s.quiesce for s in switches)
    switch_factor = real / predicted if predicted > 0 and real > 0 else 1.0
    factors: dict[Layout, float] = {}
    scale: dict[Layout, float] = {}
    for layout, measured in static.items():

        def share(
            factor: float, layout: Layout = layout, measured: Sequence[float] = measured
        ) -> float:
            """Simulated over measured time, were all steps `factor` times as long."""
            truth = ScaledTruth(profiled, {layout: factor})
            seconds = [
                simulate(trace, StayPolicy(layout), truth, profile).generation_seconds
                for trace in traces
            ]
            return statistics.median(s / r for s, r in zip(seconds, measured, strict=True))

        plain = share(1.0)
        factors[layout] = 1 / plain
        scale[layout] = _root(share, 1.0, plain)
    truth = ScaledTruth(profiled, scale, switch_factor)
    return CalibratedSimulator(truth, profile, tuple(static), factors, switch_factor)


def _root(share: Callable[[float], float], factor: float, value: float) -> float:
    """The factor at which `share` is 1, by the secant method: it grows with the factor, but not
    in proportion where an engine also waits for requests."""
    before, slope = factor, value / factor
    for _ in range(_ROUNDS):
        if abs(value - 1) < _CLOSE:
            break
        factor = min(4 * before, max(before / 4, before + (1 - value) / slope))
        now = share(factor)
        if factor != before:
            slope = max((now - value) / (factor - before), 0.05 * slope)
        before, value = factor, now
    return factor


_ROUNDS = 8
_CLOSE = 0.001

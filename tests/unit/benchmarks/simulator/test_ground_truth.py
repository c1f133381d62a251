"""Durations of simulated steps: those of a profile, with noise."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.simulator.ground_truth import ReplayedGroundTruth
from pat_vllm.profile import Profile, StepShape
from tests.support.modelled_profile import modelled_profile
from tests.unit.benchmarks.simulator.simple import ONE, TWO


def noisy_profile(*ratios: float) -> Profile:
    """A modelled profile each of whose steps was repeated, in `ratios` of its time."""
    profile = modelled_profile("llama-3.1-8b", "H100", 2)
    steps = tuple(
        s.model_copy(update={"times": tuple(ratio * s.seconds for ratio in ratios)})
        for s in profile.steps
    )
    return profile.model_copy(update={"steps": steps})


def test_measured_steps_are_replayed() -> None:
    profile = noisy_profile(1.0)
    truth = ReplayedGroundTruth(profile)
    for s in profile.steps:
        if not (s.batch and s.prefill):
            assert truth.step_seconds(s.layout, s.shape, 0) == pytest.approx(s.seconds, rel=0.01)

    def seconds(batch: int, prefill: int = 0) -> float:
        context, longest = (batch * 1024, 1024) if batch else (0, 0)
        return truth.step_seconds(ONE, StepShape(batch, context, longest, prefill=prefill), 0)

    assert seconds(96) < seconds(112) < seconds(128), "between two samples"
    assert seconds(1024) == pytest.approx(4 * seconds(256)), "beyond the largest batch"
    # A prompt beside a batch reads the weights once.
    assert seconds(8) < seconds(8, prefill=512) < seconds(8) + seconds(0, prefill=512)


def test_noise_is_that_of_single_steps() -> None:
    profile = noisy_profile(0.8, 1.0, 1.0, 1.3)
    plain, noisy, other = (
        ReplayedGroundTruth(profile, noise, seed)
        for noise, seed in ((None, 0), (profile, 0), (profile, 1))
    )
    shapes = [StepShape(4, 4 * n, n) for n in range(512, 2048)]
    times = [noisy.step_seconds(TWO, shape, 0) for shape in shapes]
    factors = [t / plain.step_seconds(TWO, s, 0) for t, s in zip(times, shapes, strict=True)]
    assert {round(factor, 6) for factor in factors} == {0.8, 1.0, 1.3}
    assert statistics.mean(factors) == pytest.approx(1.025, abs=0.01)
    assert times == [noisy.step_seconds(TWO, shape, 1) for shape in shapes]
    assert times != [other.step_seconds(TWO, shape, 0) for shape in shapes]


def test_steps_with_drafts_are_replayed() -> None:
    profile = modelled_profile("llama-3.1-8b", "A40", 4, draft_lengths=(1, 2, 4), drafting=1e-3)
    truth = ReplayedGroundTruth(profile)
    for sample in profile.steps:
        if sample.k and sample.batch:
            seconds = truth.step_seconds(sample.layout, sample.shape, 0.0)
            # What fills memory is no power of two, between which times are linear.
            whole = (sample.context // sample.batch).bit_count() == 1
            assert seconds == pytest.approx(sample.seconds, rel=1e-6 if whole else 0.01)
    half, none, every = (
        truth.step_seconds(profile.layouts[0], StepShape(8, 8000, 1000, drafts=drafts, k=4), 0.0)
        for drafts in (16, 0, 32)
    )
    assert half == pytest.approx((none + every) / 2)

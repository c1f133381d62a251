"""Which profiles are good enough to decide by."""

from __future__ import annotations

from pathlib import Path

import pytest

from pat_vllm.layout import Layout
from pat_vllm.profile import Profile, StepSample, StepShape
from pat_vllm.profiling.quality import becomes_complete, problems

ROOT = Path(__file__).parents[3]
QUIET = (0.0030, 0.0031, 0.0029, 0.0032, 0.0030, 0.0031, 0.0030)
OUTLIER = (*QUIET, 0.089)
NOISY = (0.003, 0.021, 0.004, 0.089, 0.007, 0.034, 0.003)


def step(times: tuple[float, ...]) -> StepSample:
    return StepSample.of(Layout(1, 2), StepShape(8, 64, 8), times)


def test_a_noisy_profile_is_named_with_figures() -> None:
    # An outlier does not change the median, and one or two times say nothing of it.
    for times in (QUIET, OUTLIER, (0.003,), (0.003, 0.089)):
        assert problems([step(times)] * 10) == []
    assert problems([step(NOISY)] * 2 + [step(QUIET)] * 8) == []
    (problem,) = problems([step(NOISY)] * 3 + [step(QUIET)] * 7)
    assert "noisy: in 3 of 10 steps" in problem
    assert "tp1dp2 with batch 8 took from 3 to 89 ms" in problem


def test_an_incomplete_profile_is_named_with_figures() -> None:
    assert problems([step(QUIET)], left_out=16, planned=64) == []
    (problem,) = problems([step(QUIET)], left_out=34, planned=64)
    assert "incomplete: 34 of 64 points were left out" in problem
    assert len(problems([step(NOISY)], left_out=34, planned=64)) == 2


@pytest.mark.parametrize(
    "name", ["2026-11-23-two-cores", "2026-11-23-two-cores-bound", "2026-11-26-h100-qwen3-8b"]
)
def test_measured_profiles_are_good_enough(name: str) -> None:
    profile = Profile.load(ROOT / "benchmarks/profiles" / f"{name}.json")
    assert all(len(sample.times) >= 3 for sample in profile.steps)
    assert problems(profile.steps) == []


def test_a_plan_is_gone_on_with_while_that_can_make_it_complete() -> None:
    assert becomes_complete(measured=0, skipped=0, planned=64)
    assert becomes_complete(measured=47, skipped=16, planned=64)
    assert not becomes_complete(measured=48, skipped=0, planned=64)
    assert not becomes_complete(measured=10, skipped=17, planned=64)

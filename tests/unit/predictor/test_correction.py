"""How real steps with drafts, and steps without, correct what a profile says of either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pat_vllm.advice.options import AdviseOptions
from pat_vllm.advice.replay import PLANNED, Config, Task, replay_chain
from pat_vllm.advice.rollouts import rollouts_of
from pat_vllm.layout import Layout
from pat_vllm.predictor import correction as correction_module
from pat_vllm.predictor.correction import OnlineCorrection
from pat_vllm.profiling.profile import StepShape
from pat_vllm.simulator.truth import ReplayedTruth

ONE, OTHER = Layout(1, 2), Layout(2, 1)
BATCH = 32


Share = Callable[[], float]


def learn(
    correction: OnlineCorrection, steps: int, plain: float, dearer: float, share: Share
) -> None:
    """Steps in which all takes `plain` times what was predicted, and drafts `dearer` times more."""
    for _ in range(steps):
        drafts = share()
        correction.observe(ONE, BATCH, plain * (1 - drafts + drafts * dearer), drafts)


@pytest.mark.parametrize("dearer", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("plain", [1.0, 2.4])
def test_drafts_are_told_from_the_machine(plain: float, dearer: float) -> None:
    """After a few steps without drafts, in which an engine begins."""
    correction = OnlineCorrection([ONE, OTHER])
    shares = iter(np.random.default_rng(0).uniform(0.2, 0.5, 200).tolist())
    learn(correction, 20, plain, dearer, lambda: 0.0)
    learn(correction, 200, plain, dearer, lambda: next(shares))
    assert correction.factor(ONE, BATCH) == pytest.approx(plain, rel=0.1)
    for layout in (ONE, OTHER):
        drafted = correction.factor(layout, BATCH, 0.35) / correction.factor(layout, BATCH)
        assert drafted == pytest.approx(0.65 + 0.35 * dearer, rel=0.1)


def test_many_steps_at_once_are_as_one() -> None:
    correction = OnlineCorrection([ONE])
    learn(correction, 50, 2.0, 2.0, lambda: 0.3)
    batches, shares = np.array([1.0, 7.0, 64.0]), np.array([0.0, 0.3, 0.6])
    each = [correction.factor(ONE, *some) for some in zip(batches, shares, strict=True)]
    assert correction.factors(ONE, batches, shares) == pytest.approx(each)


def test_a_machine_that_slows_down_while_all_steps_have_drafts() -> None:
    correction = OnlineCorrection([ONE])
    shares = iter(np.random.default_rng(0).uniform(0.2, 0.5, 400).tolist())
    learn(correction, 20, 1.0, 1.0, lambda: 0.0)
    learn(correction, 200, 1.0, 1.0, lambda: next(shares))
    learn(correction, 200, 2.0, 1.0, lambda: next(shares))
    assert correction.factor(ONE, BATCH) == pytest.approx(2.0, rel=0.15)


def test_steps_without_drafts_tell_nothing_of_them() -> None:
    correction = OnlineCorrection([ONE])
    learn(correction, 20, 1.0, 2.0, lambda: 0.0)
    learn(correction, 100, 1.0, 2.0, lambda: 0.4)
    before = correction.factor(ONE, BATCH, 0.4) / correction.factor(ONE, BATCH)
    learn(correction, 500, 1.0, 2.0, lambda: 0.0)
    after = correction.factor(ONE, BATCH, 0.4) / correction.factor(ONE, BATCH)
    assert before > 1.2 and after == pytest.approx(before, rel=0.05)


def test_batches_whose_drafts_are_dear_take_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times what the profile says; simulated on a modelled one."""
    rollouts = rollouts_of(
        AdviseOptions("qwen3-14b", "H100", 8, responses=128, acceptance=0.3, iterations=2)
    )
    of_profile = ReplayedTruth.step_seconds

    def dear(
        self: ReplayedTruth, layout: Layout, shape: StepShape, now: float, steps: int = 1
    ) -> float:
        plain = of_profile(self, layout, replace(shape, drafts=0, k=0), now, steps)
        return plain + 4 * max(0.0, of_profile(self, layout, shape, now, steps) - plain)

    monkeypatch.setattr(ReplayedTruth, "step_seconds", dear)

    def seconds() -> float:
        reports = replay_chain(rollouts, Task(Config(None, PLANNED), 0))
        return sum(report.generation_seconds for report in reports)

    knowing = seconds()
    monkeypatch.setattr(correction_module, "_DRAFTS", 1e-9)
    assert knowing < 0.95 * seconds()

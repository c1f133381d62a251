"""How real steps with drafts, and steps without, correct what a profile says of either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pat_vllm.layout import Layout
from pat_vllm.predictor.steps.correction import OnlineCorrection
from pat_vllm.predictor.steps.step_time import StepTimeModel
from tests.support.modelled_profile import modelled_profile
from tests.unit.predictor.examples import decode

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


def test_a_machine_that_slows_down_while_all_steps_have_drafts() -> None:
    correction = OnlineCorrection([ONE])
    shares = iter(np.random.default_rng(0).uniform(0.2, 0.5, 400).tolist())
    learn(correction, 20, 1.0, 1.0, lambda: 0.0)
    learn(correction, 200, 1.0, 1.0, lambda: next(shares))
    learn(correction, 200, 2.0, 1.0, lambda: next(shares))
    assert correction.factor(ONE, BATCH) == pytest.approx(2.0, rel=0.15)
    before = float(correction.factor(ONE, 7, 0.3))
    assert correction.observe(ONE, 7, 1.0, 0.3) == pytest.approx(before)


def test_steps_without_drafts_tell_nothing_of_them() -> None:
    correction = OnlineCorrection([ONE])
    learn(correction, 20, 1.0, 2.0, lambda: 0.0)
    learn(correction, 100, 1.0, 2.0, lambda: 0.4)
    before = correction.factor(ONE, BATCH, 0.4) / correction.factor(ONE, BATCH)
    learn(correction, 500, 1.0, 2.0, lambda: 0.0)
    after = correction.factor(ONE, BATCH, 0.4) / correction.factor(ONE, BATCH)
    assert before > 1.2 and after == pytest.approx(before, rel=0.05)


def test_dear_drafts_do_not_make_a_models_other_steps_slow() -> None:
    """Four times what a modelled profile says."""
    profile = modelled_profile("llama-3.1-8b", "H100", 4, draft_lengths=(1, 2, 4))
    model, layout = StepTimeModel.fit(profile), profile.layouts[0]
    plain = decode(BATCH)
    before = model.step(layout, plain)
    for _ in range(20):
        model.observe(layout, plain, before)
    drafted = [replace(plain, drafts=k * BATCH, k=k) for k in (1, 2, 4)]
    dear = [before + 4 * (model.step(layout, shape) - before) for shape in drafted]
    for _ in range(200):
        for shape, seconds in zip(drafted, dear, strict=True):
            model.observe(layout, shape, seconds)
    assert model.step(layout, plain) == pytest.approx(before, rel=0.1)
    assert [model.step(layout, shape) for shape in drafted] == pytest.approx(dear, rel=0.15)

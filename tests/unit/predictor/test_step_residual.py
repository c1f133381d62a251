"""The residual of step times: where cross-validation lets it be used, and where not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pat_vllm.layout import Layout
from pat_vllm.predictor.steps.step_residual import StepFit, cross_validate, folds
from pat_vllm.predictor.steps.step_time import StepTimeModel
from pat_vllm.profile import Profile, StepSample, StepShape
from tests.unit.predictor.examples import decode, profile_of

LAYOUTS = ONE, TWO = Layout(1, 2), Layout(2, 1)
CAPTURED = (1, 2, 4, 8, 16, 24, 32)
BATCHES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 20, 24, 25, 28, 32)
SHAPES = [decode(batch, each) for batch in BATCHES for each in (128, 512, 1024, 2048, 4096, 8192)]

StepSeconds = Callable[[StepShape], float]


def exact(shape: StepShape) -> float:
    """A sum of work terms: the roofline's own form."""
    return 5e-3 + 1e-4 * shape.batch + 2e-8 * shape.context


def stepped(shape: StepShape) -> float:
    """Batches are padded to the next size that a graph was captured for."""
    padded = next(size for size in CAPTURED if size >= shape.batch)
    return exact(replace(shape, batch=10 * padded))


def make_profile(
    truth: dict[Layout, StepSeconds], seed: int = 0, count: int = len(SHAPES), noise: float = 0.02
) -> Profile:
    rng = np.random.default_rng(seed)
    steps = [
        StepSample.of(layout, shape, [seconds(shape) * float(np.exp(noise * rng.normal()))])
        for layout, seconds in truth.items()
        for shape in rng.permutation(np.array(SHAPES, object))[:count]
    ]
    return profile_of(list(truth), steps)


@pytest.mark.parametrize("seed", range(6))
def test_the_residual_is_used_where_steps_have_a_structure_that_no_roofline_has(seed: int) -> None:
    profile = make_profile({ONE: exact, TWO: stepped}, seed)
    fits = cross_validate(profile.steps, 0.0, seed=seed)
    errors = {layout: np.mean(fits[layout].roofline) for layout in LAYOUTS}
    assert [fits[layout].learned for layout in LAYOUTS] == [False, True]
    assert 0.01 < errors[ONE] < 0.04, "the noise"

    model = StepTimeModel.fit(profile)
    assert model.fits == StepTimeModel.fit(profile).fits, "the same for the same profile"
    for layout, truth in ((ONE, exact), (TWO, stepped)):
        known = [model.step(layout, shape) / truth(shape) - 1 for shape in SHAPES]
        assert np.abs(known).mean() < 0.5 * errors[TWO]
    alone = StepTimeModel.fit(make_profile({ONE: exact}, seed))
    for shape in SHAPES:
        assert model.step(ONE, shape) == pytest.approx(alone.step(ONE, shape)), "roofline alone"


@pytest.mark.parametrize("count", [1, 2, 8, 10])
def test_of_few_samples_the_roofline_stands_alone(count: int) -> None:
    (fit,) = StepTimeModel.fit(make_profile({TWO: stepped}, count=count)).fits.values()
    assert fit == StepFit()


def test_repeats_of_a_shape_are_held_out_together() -> None:
    steps = [
        StepSample.of(layout, replace(shape, longest=longest), [1.0])
        for layout in LAYOUTS
        for shape in SHAPES
        for longest in (shape.longest, 2 * shape.longest)
    ]
    parts = [*folds(steps, 3, seed=0)]
    assert sum(len(held) for held, _ in parts) == len(steps)
    for held, kept in parts:
        of_both = [{(s.layout, s.batch, s.context) for s in samples} for samples in (held, kept)]
        assert of_both[0].isdisjoint(of_both[1])
        assert {s.layout for s in held} == {*LAYOUTS} and len(held) + len(kept) == len(steps)

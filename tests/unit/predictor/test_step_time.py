"""The step-time model: accuracy, and what it learns from real steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.predictor.steps.step_residual import StepFit
from pat_vllm.predictor.steps.step_time import StepTimeModel
from pat_vllm.profile import Profile, StepSample, StepShape
from tests.support.held_out import held_out_error
from tests.unit.predictor.examples import decode, profile_of

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048)
LAYOUTS = ONE, TWO, FOUR, EIGHT = tuple(Layout.of(tp, 8) for tp in (1, 2, 4, 8))
StepSeconds = Callable[[Layout, StepShape], float]


def roofline(layout: Layout, shape: StepShape) -> float:
    """A GPU: weights and KV are read while the tokens are computed."""
    tp = layout.tp
    tokens = shape.batch + shape.prefill
    reading = 0.006 / tp + 1.5e-8 * shape.context / tp
    return float(1e-3 + 2e-4 * np.log2(tp) + max(reading, 3e-5 * tokens / tp) + 2e-6 * shape.batch)


def saturating(layout: Layout, shape: StepShape) -> float:
    """A CPU: batches get cheaper per request, replicas contend until the machine is saturated."""
    contention = 1 + 0.6 * min(1, (shape.busy - 1) / 3)
    work = 0.012 + 0.004 * shape.batch**0.75 + 4e-7 * shape.context + 2.5e-4 * shape.prefill
    tp = layout.tp
    return float(3e-3 + 5e-4 * (tp - 1) + (work / tp + 3e-7 * shape.longest) * contention)


def make_profile(
    truth: StepSeconds,
    *,
    noise: float = 0.02,
    layouts: Sequence[Layout] = LAYOUTS,
    scale: Mapping[Layout, float] | None = None,
    shapes: Sequence[StepShape] = (),
) -> Profile:
    """A profile of steps that take their true time but for some noise.

    Args:
        scale: factor by which the steps of a layout are wrong.
        shapes: of the steps (default: a grid, and prefills).
    """
    rng = np.random.default_rng(0)
    prefills = [StepShape(0, 0, 0, tokens) for tokens in (64, 256, 1024, 4096)]
    steps = []
    for layout in layouts:
        grid = [
            decode(batch, each, busy)
            for batch in BATCHES
            for each in CONTEXTS
            for busy in sorted({1, layout.replicas})
        ]
        for shape in shapes or grid + prefills:
            factor = float(np.exp(noise * rng.standard_normal())) * (scale or {}).get(layout, 1.0)
            steps.append(StepSample.of(layout, shape, [truth(layout, shape) * factor]))
    return profile_of(layouts, steps)


@pytest.fixture(scope="module")
def fitted() -> StepTimeModel:
    return StepTimeModel.fit(make_profile(saturating))


@pytest.fixture
def model(fitted: StepTimeModel) -> StepTimeModel:
    return copy.deepcopy(fitted)


def uncorrected(model: StepTimeModel) -> StepTimeModel:
    """The model as it was before it saw any step."""
    return StepTimeModel(model._models, model.fits)


def correction(model: StepTimeModel, layout: Layout, batch: int) -> float:
    """Real over profiled time of a decode step, as learned so far."""
    return model.step(layout, decode(batch)) / uncorrected(model).step(layout, decode(batch))


def observe(
    model: StepTimeModel,
    layout: Layout,
    shape: StepShape,
    factor: float,
    count: int,
    *,
    noise: float = 0.05,
    outlier_every: int = 0,
    seed: int = 0,
) -> None:
    """Steps that take `factor` times what the uncorrected model predicts."""
    rng = np.random.default_rng(seed)
    expected = uncorrected(model).step(layout, shape)
    for i in range(count):
        seconds = expected * factor * float(np.exp(noise * rng.standard_normal()))
        if outlier_every and i % outlier_every == outlier_every - 1:
            seconds *= 10
        model.observe(layout, shape, seconds)


# Accuracy


def test_held_out_error_is_small_and_the_residual_learns_what_the_linear_base_cannot() -> None:
    profiles = {truth: make_profile(truth) for truth in (roofline, saturating)}
    errors = {truth: held_out_error(profile) for truth, profile in profiles.items()}
    for of_truth in errors.values():
        assert set(of_truth) == set(LAYOUTS)
        for layout, error in of_truth.items():
            assert error.mean() <= 0.04, (layout, error)
            assert len(error) == len(BATCHES) * len(CONTEXTS) * len({1, layout.replicas})
    never = dict.fromkeys(LAYOUTS, StepFit())
    with patch("pat_vllm.predictor.steps.step_time.cross_validate", lambda *_: never):
        linear = held_out_error(profiles[saturating])
    for layout, error in errors[saturating].items():
        assert error.mean() < 0.7 * linear[layout].mean()


@pytest.mark.parametrize("count", [1, 2, 7])
def test_few_samples_give_sane_times(count: int) -> None:
    shapes = [decode(b) for b in (1, 64, 8, 2, 32, 4, 16)[:count]]
    model = StepTimeModel.fit(make_profile(roofline, noise=0, layouts=(TWO,), shapes=shapes))
    for shape in shapes:
        assert model.step(TWO, shape) == pytest.approx(roofline(TWO, shape), rel=0.1)
    between = model.seconds(TWO, [1, 3, 24, 64], [512, 1536, 12288, 32768], 512)
    assert np.all((between > 1e-3) & (between < 0.05))


def test_prefills_mixed_steps_and_large_batches_follow_the_base(model: StepTimeModel) -> None:
    for shape in (StepShape(0, 0, 0, 1024), StepShape(0, 0, 0, 2000), StepShape(8, 4096, 512, 512)):
        assert model.step(TWO, shape) == pytest.approx(saturating(TWO, shape), rel=0.15)

    def linear(layout: Layout, shape: StepShape) -> float:
        return 5e-3 + 1e-4 * shape.batch + 1e-7 * shape.context

    far = StepTimeModel.fit(make_profile(linear, layouts=(EIGHT,)))
    for shape in (decode(64, 20000), decode(400, 500), decode(400, 5000), decode(3000, 2000)):
        assert far.step(EIGHT, shape) == pytest.approx(linear(EIGHT, shape), rel=0.1)


@st.composite
def models(draw: st.DrawFn) -> StepTimeModel:
    """Models of samples that need not make sense, and observations that do not either."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sizes = st.tuples(st.integers(1, 200), st.integers(0, 10**5), st.integers(1, 2))
    shapes = [
        StepShape(batch, context, min(context, draw(st.integers(1, 4000))), 0, busy)
        for batch, context, busy in draw(st.lists(sizes, min_size=1, max_size=40))
    ]
    profile = make_profile(
        lambda layout, shape: float(np.exp(rng.normal(-4, 1))), layouts=(ONE, TWO), shapes=shapes
    )
    model = StepTimeModel.fit(profile)
    for _ in range(draw(st.sampled_from([0, 0, 3, 60]))):
        shape = decode(int(2 ** rng.uniform(0, 8)), int(rng.uniform(1, 4000)))
        model.observe((ONE, TWO)[rng.integers(2)], shape, float(np.exp(rng.normal(-4, 2))))
    return model


@settings(max_examples=25)
@given(models(), st.integers(0, 2**32), st.data())
def test_times_are_finite_and_positive_and_arguments_broadcast(
    model: StepTimeModel, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    batch, context = 2 ** rng.uniform(0, 16, 400), 2 ** rng.uniform(0, 26, 400)
    longest, prefill = rng.uniform(0, 10**5, 400), rng.integers(0, 9000, 400)
    for layout in (ONE, TWO):
        seconds = model.seconds(layout, batch, context, longest, prefill, rng.integers(1, 6, 400))
        assert np.all(np.isfinite(seconds)) and np.all(seconds > 0)
    most = st.tuples(*(st.integers(0, limit) for limit in (5000, 10**7, 10**5)))
    fields = (
        *data.draw(most),
        data.draw(st.sampled_from([0, 1, 700, 9000])),
        int(rng.integers(1, 6)),
    )
    fields = tuple(int(field) for field in fields)
    scalar = model.step(TWO, StepShape(*fields))
    decoding = replace(StepShape(*fields), prefill=0)
    plain = uncorrected(model).step(TWO, decoding)
    assert model._models[TWO].at(decoding) == pytest.approx(plain, rel=1e-9)
    arrays = [np.array([field, field]) for field in fields]
    mixed = model.seconds(TWO, fields[0], arrays[1][:, None], fields[2], arrays[3], fields[4])
    assert mixed == pytest.approx(np.full((2, 2), scalar), rel=1e-9)


# Online


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_change_of_the_machine_is_followed_within_twenty_steps(
    model: StepTimeModel, factor: float
) -> None:
    assert correction(model, ONE, 16) == 1.0 and model.correction_version == 0
    observe(model, ONE, decode(16), 1.0, 100)
    before = model.step(ONE, decode(16))
    observe(model, ONE, decode(16), factor, 20, seed=1)
    assert correction(model, ONE, 16) == pytest.approx(factor, rel=0.1)
    assert model.step(ONE, decode(16)) / before == pytest.approx(factor, rel=0.12)
    # It is taken for the machine's, so other batches and layouts change, too.
    assert correction(model, ONE, 64) == pytest.approx(factor, rel=0.1)
    assert (correction(model, FOUR, 16) - 1) / (factor - 1) > 0.5


def test_outliers_hardly_move_it_and_noise_does_not_bias(fitted: StepTimeModel) -> None:
    first, later, noisy = (copy.deepcopy(fitted) for _ in range(3))
    observe(first, ONE, decode(16), 10.0, 1)
    assert correction(first, ONE, 16) < 1.25, "even the very first step"
    observe(first, ONE, decode(16), 1.0, 10)
    assert correction(first, ONE, 16) == pytest.approx(1.0, abs=0.1)
    observe(later, ONE, decode(16), 1.0, 30)
    before = correction(later, ONE, 16)
    observe(later, ONE, decode(16), 10.0, 1)
    assert correction(later, ONE, 16) == pytest.approx(before, rel=0.03)
    observe(later, ONE, decode(16), 1.0, 200, outlier_every=10)
    assert correction(later, ONE, 16) == pytest.approx(1.0, abs=0.05)
    observe(noisy, ONE, decode(16), 1.0, 400, noise=0.25)
    assert correction(noisy, ONE, 16) == pytest.approx(1.0, abs=0.12)


def test_one_wrong_layout_is_corrected_without_spoiling_the_others() -> None:
    right = {layout: saturating(layout, decode(4)) for layout in LAYOUTS}
    model = StepTimeModel.fit(make_profile(saturating, scale={FOUR: 0.5}))
    rng = np.random.default_rng(0)
    for layout, count in ((ONE, 40), (TWO, 40), (FOUR, 20)):
        for _ in range(count):
            noise = float(np.exp(0.05 * rng.standard_normal()))
            model.observe(layout, decode(4), right[layout] * noise)
    # One of three that is wrong by two casts a little doubt on the one never seen.
    for layout in LAYOUTS:
        rel = 0.27 if layout == EIGHT else 0.1
        assert model.step(layout, decode(4)) == pytest.approx(right[layout], rel=rel)


def test_a_correction_of_one_request_does_not_reach_a_large_batch_of_equal_total_context() -> None:
    def reading(layout: Layout, shape: StepShape) -> float:
        return 1e-3 + 1e-7 * shape.context

    model = StepTimeModel.fit(make_profile(reading, layouts=(EIGHT,)))
    before = model.step(EIGHT, decode(64, 2000))
    for seed in range(10):
        observe(model, EIGHT, decode(1), 2.0, 10, seed=seed)
        observe(model, EIGHT, decode(64, 2000), 1.0, 10, seed=seed)
    assert correction(model, EIGHT, 1) > 1.8
    assert model.step(EIGHT, decode(64, 2000)) == pytest.approx(before, rel=0.08)


def test_only_decode_steps_teach_and_corrections_stay_within_a_factor_of_eight(
    model: StepTimeModel,
) -> None:
    for shape in (StepShape(4, 2048, 512, 300), StepShape(0, 0, 0, 300)):
        model.observe(ONE, shape, 100.0)
    assert correction(model, ONE, 4) == 1.0
    observe(model, ONE, decode(4), 1000.0, 100)
    assert correction(model, ONE, 4) == pytest.approx(8.0, rel=0.01)
    observe(model, ONE, decode(4), 1e-3, 100)
    assert correction(model, ONE, 4) == pytest.approx(1 / 8, rel=0.01)


def test_the_version_grows_with_corrections_that_matter(model: StepTimeModel) -> None:
    observe(model, ONE, decode(16), 1.0, 50, noise=0.005)
    assert model.correction_version == 0
    observe(model, ONE, decode(16), 1.5, 30, noise=0.005)
    grown = model.correction_version
    assert 1 <= grown <= 20
    observe(model, ONE, decode(16), 1.5, 100, noise=0.005)
    assert model.correction_version <= grown + 2


def test_each_draft_of_a_drafter_with_weights_takes_a_pass() -> None:
    """Also at lengths that were not measured; of a search, k says only whether it is made."""

    def seconds(layout: Layout, shape: StepShape) -> float:
        return roofline(layout, shape) + 2e-5 * shape.drafts + 1e-3 * shape.k

    drafting = [
        replace(decode(batch, each), k=k, drafts=k * batch)
        for batch in BATCHES
        for each in CONTEXTS
        for k in (2, 8)
    ]
    shapes = [*(decode(batch, each) for batch in BATCHES for each in CONTEXTS), *drafting]
    measured = make_profile(seconds, noise=0.0, layouts=(TWO,), shapes=shapes)
    of_passes, of_search = (
        StepTimeModel.fit(measured.model_copy(update={"drafter_has_weights": has}))
        for has in (True, False)
    )
    off = {
        model: abs(model.step(TWO, shape) / seconds(TWO, shape) - 1)
        for shape in (replace(decode(8, 512), k=5, drafts=40),)
        for model in (of_passes, of_search)
    }
    assert off[of_passes] < 0.06 < off[of_search], off

"""The step-time model: accuracy, and what it learns from real steps."""

import copy
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.cli.held_out import held_out_error
from pat_vllm.layout import Layout
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profiling.profile import Profile, StepSample, StepShape

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048)
PREFILLS = (64, 256, 1024, 4096)
TPS = (1, 2, 4, 8)
LAYOUTS = ONE, TWO, FOUR, EIGHT = tuple(Layout.of(tp, 8) for tp in TPS)


def roofline(layout, shape):
    """A GPU: weights and KV are read while the tokens are computed."""
    tp = layout.tp
    tokens = shape.batch + shape.prefill
    reading = 0.006 / tp + 1.5e-8 * shape.context / tp
    return 1e-3 + 2e-4 * np.log2(tp) + max(reading, 3e-5 * tokens / tp) + 2e-6 * shape.batch


def saturating(layout, shape):
    """A CPU: batches get cheaper per request, replicas contend until the machine is saturated."""
    contention = 1 + 0.6 * min(1, (shape.busy - 1) / 3)
    work = 0.012 + 0.004 * shape.batch**0.75 + 4e-7 * shape.context + 2.5e-4 * shape.prefill
    tp = layout.tp
    return 3e-3 + 5e-4 * (tp - 1) + (work / tp + 3e-7 * shape.longest) * contention


def make_profile(truth, *, noise=0.02, seed=0, layouts=LAYOUTS, scale=None, shapes=None):
    rng = np.random.default_rng(seed)
    steps = []
    for layout in layouts:
        grid = [
            StepShape(batch, batch * each, each, 0, busy)
            for batch in BATCHES
            for each in CONTEXTS
            for busy in sorted({1, layout.replicas})
        ]
        prefills = [StepShape(0, 0, 0, tokens, 1) for tokens in PREFILLS]
        for shape in shapes or grid + prefills:
            seconds = truth(layout, shape) * float(np.exp(noise * rng.standard_normal()))
            seconds *= (scale or {}).get(layout, 1.0)
            steps.append(
                StepSample(
                    layout=layout,
                    batch=shape.batch,
                    context=shape.context,
                    longest=shape.longest,
                    prefill=shape.prefill,
                    busy=shape.busy,
                    seconds=seconds,
                    low=seconds,
                    high=seconds,
                    repeats=3,
                )
            )
    tps = [layout.tp for layout in layouts]
    return Profile(
        kind="measured",
        title="synthetic",
        created="2000-01-01T00:00:00",
        key={},
        ranks=layouts[0].world_size,
        layouts=layouts,
        max_num_seqs=dict.fromkeys(tps, 64),
        max_batch_tokens=dict.fromkeys(tps, 8192),
        kv_tokens=dict.fromkeys(tps, 10**6),
        kv_bytes_per_token=1024,
        steps=tuple(steps),
    )


@pytest.fixture(scope="module")
def fitted():
    return StepTimeModel.fit(make_profile(saturating))


@pytest.fixture
def model(fitted):
    return copy.deepcopy(fitted)


def decode(batch, each=512, busy=1):
    return StepShape(batch, batch * each, each, 0, busy)


def run(model, layout, shape, factor, count, *, noise=0.05, outlier_every=0, seed=0):
    """Observe steps that take `factor` times what the uncorrected model predicts."""
    rng = np.random.default_rng(seed)
    expected = model.step(layout, shape) / model.correction(layout, shape.batch)
    for i in range(count):
        seconds = expected * factor * float(np.exp(noise * rng.standard_normal()))
        if outlier_every and i % outlier_every == outlier_every - 1:
            seconds *= 10
        model.observe(layout, shape, seconds)


# Accuracy


@pytest.mark.parametrize("truth", [roofline, saturating])
def test_held_out_error_is_at_most_four_percent(truth):
    errors = held_out_error(make_profile(truth))
    assert set(errors) == set(LAYOUTS)
    for layout, error in errors.items():
        assert error.mean() <= 0.04, (layout, error)
        assert len(error) == len(BATCHES) * len(CONTEXTS) * len({1, layout.replicas})


def test_the_residual_learns_what_the_linear_base_cannot():
    profile = make_profile(saturating)
    with patch("pat_vllm.predictor.step_time._fit_residual", lambda *_: None):
        linear = held_out_error(profile)
    for layout, error in held_out_error(profile).items():
        assert error.mean() < 0.7 * linear[layout].mean()


def test_held_out_shapes_are_random_and_depend_on_the_seed_alone():
    profile = make_profile(roofline)
    one, again, other = (held_out_error(profile, seed=seed)[ONE] for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_repeats_of_a_shape_are_held_out_together():
    # Each shape has a factor of its own, which only its own samples could teach.
    def odd(layout, shape):
        doubled = (shape.batch.bit_length() + shape.longest) % 2
        return roofline(layout, shape) * (1.5 if doubled else 1)

    shapes = [decode(b, each + b % 3) for b in range(1, 40, 2) for each in (500, 900)]
    with patch("pat_vllm.predictor.step_time._fit_residual", lambda *_: None):
        once, thrice = (
            held_out_error(make_profile(odd, noise=0, layouts=(ONE,), shapes=shapes * repeats))
            for repeats in (1, 3)
        )
    assert thrice[ONE].mean() > 0.8 * once[ONE].mean()
    assert len(thrice[ONE]) == 3 * len(once[ONE])


def test_profiled_points_are_hit():
    profile = make_profile(saturating, noise=0)
    model = StepTimeModel.fit(profile)
    for sample in profile.steps:
        if sample.batch:
            assert model.step(sample.layout, sample.shape) == pytest.approx(
                sample.seconds, rel=0.08
            )


@pytest.mark.parametrize("tps", [(16,), (1, 2, 4, 8, 16)])
def test_sizes_up_to_sixteen(tps):
    layouts = tuple(Layout.of(tp, 16) for tp in tps)
    model = StepTimeModel.fit(make_profile(roofline, layouts=layouts))
    for layout in layouts:
        shape = decode(12, 700)
        assert model.step(layout, shape) == pytest.approx(roofline(layout, shape), rel=0.08)
    with pytest.raises(KeyError):
        model.step(Layout(16, 1, "ep"), decode(1))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_few_samples_give_sane_times(count):
    shapes = [decode(b) for b in (1, 64, 8, 2, 32, 4, 16)[:count]]
    model = StepTimeModel.fit(make_profile(roofline, noise=0, layouts=(TWO,), shapes=shapes))
    for shape in shapes:
        assert model.step(TWO, shape) == pytest.approx(roofline(TWO, shape), rel=0.1)
    between = model.seconds(TWO, [1, 3, 24, 64], [512, 1536, 12288, 32768], 512)
    assert np.all((between > 1e-3) & (between < 0.05))


def test_a_prefill_and_a_mixed_step():
    model = StepTimeModel.fit(make_profile(saturating))
    for shape in (StepShape(0, 0, 0, 1024), StepShape(0, 0, 0, 2000), StepShape(8, 4096, 512, 512)):
        assert model.step(TWO, shape) == pytest.approx(saturating(TWO, shape), rel=0.15)


def test_outside_the_profiled_range_it_follows_the_base():
    def linear(layout, shape):
        return 5e-3 + 1e-4 * shape.batch + 1e-7 * shape.context

    profile = make_profile(linear, layouts=(EIGHT,))
    model = StepTimeModel.fit(profile)
    for shape in (decode(64, 20000), decode(400, 500), decode(400, 5000), decode(3000, 2000)):
        assert model.step(EIGHT, shape) == pytest.approx(linear(EIGHT, shape), rel=0.1)


# Finite, positive


def anything(draw, rng):
    """A model of samples that need not make sense, and observations that do not either."""
    shapes = [
        StepShape(b, c, min(c, draw(st.integers(1, 4000))), 0, busy)
        for b, c, busy in draw(
            st.lists(
                st.tuples(st.integers(1, 200), st.integers(0, 10**5), st.integers(1, 2)),
                min_size=1,
                max_size=40,
            )
        )
    ]
    profile = make_profile(
        lambda layout, shape: float(np.exp(rng.normal(-4, 1))), layouts=(ONE, TWO), shapes=shapes
    )
    model = StepTimeModel.fit(profile)
    for _ in range(draw(st.sampled_from([0, 0, 3, 60]))):
        shape = decode(int(2 ** rng.uniform(0, 8)), int(rng.uniform(1, 4000)))
        model.observe((ONE, TWO)[rng.integers(2)], shape, float(np.exp(rng.normal(-4, 2))))
    return model


@st.composite
def models(draw):
    return anything(draw, np.random.default_rng(draw(st.integers(0, 2**32))))


@settings(max_examples=30, deadline=None)
@given(models(), st.integers(0, 2**32))
def test_times_are_finite_and_positive(model, seed):
    rng = np.random.default_rng(seed)
    batch, context = 2 ** rng.uniform(0, 16, 400), 2 ** rng.uniform(0, 26, 400)
    longest, prefill = rng.uniform(0, 10**5, 400), rng.integers(0, 9000, 400)
    for layout in (ONE, TWO):
        seconds = model.seconds(layout, batch, context, longest, prefill, rng.integers(1, 6, 400))
        assert np.all(np.isfinite(seconds)) and np.all(seconds > 0)


@settings(max_examples=30, deadline=None)
@given(models(), st.data())
def test_step_and_seconds_agree_and_arguments_broadcast(model, data):
    shape = StepShape(
        data.draw(st.integers(0, 5000)),
        data.draw(st.integers(0, 10**7)),
        data.draw(st.integers(0, 10**5)),
        data.draw(st.sampled_from([0, 1, 700, 9000])),
        data.draw(st.integers(1, 5)),
    )
    fields = (shape.batch, shape.context, shape.longest, shape.prefill, shape.busy)
    one = model.step(TWO, shape)
    assert one == pytest.approx(float(model.seconds(TWO, *fields)), rel=1e-9)
    arrays = [np.array([field, field]) for field in fields]
    assert model.seconds(TWO, *arrays) == pytest.approx([one, one], rel=1e-9)
    mixed = model.seconds(
        TWO, shape.batch, arrays[1][:, None], shape.longest, arrays[3], shape.busy
    )
    assert mixed.shape == (2, 2)
    assert mixed == pytest.approx(np.full((2, 2), one), rel=1e-9)


def test_fitting_is_deterministic():
    profile = make_profile(saturating)
    one, other = (StepTimeModel.fit(profile) for _ in range(2))
    batch = np.array([0, 1, 5.5, 30, 3000])
    for layout in LAYOUTS:
        first, second = (m.seconds(layout, batch, batch * 700, 900, 10, 2) for m in (one, other))
        assert np.array_equal(first, second)


# Online


def test_unobserved_models_are_uncorrected(model):
    assert model.correction(ONE, 16) == 1.0
    assert model.correction_version == 0


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_change_of_the_machine_is_followed_within_twenty_steps(model, factor):
    run(model, ONE, decode(16), 1.0, 100)
    before = model.step(ONE, decode(16))
    run(model, ONE, decode(16), factor, 20, seed=1)
    assert model.correction(ONE, 16) == pytest.approx(factor, rel=0.1)
    assert model.step(ONE, decode(16)) / before == pytest.approx(factor, rel=0.12)
    # It is taken for the machine's, so the other layouts change, too.
    assert (model.correction(FOUR, 16) - 1) / (factor - 1) > 0.5


def test_slow_drift_is_followed(model):
    for i in range(300):
        run(model, ONE, decode(16), 1 + i / 300, 1, seed=i)
    assert model.correction(ONE, 16) == pytest.approx(2.0, rel=0.1)


def test_outliers_hardly_move_it(model):
    run(model, ONE, decode(16), 1.0, 30)
    before = model.correction(ONE, 16)
    run(model, ONE, decode(16), 10.0, 1)
    assert model.correction(ONE, 16) == pytest.approx(before, rel=0.03)
    run(model, ONE, decode(16), 1.0, 200, outlier_every=10)
    assert model.correction(ONE, 16) == pytest.approx(1.0, abs=0.05)


def test_even_a_first_outlier_is_not_believed(model):
    run(model, ONE, decode(16), 10.0, 1)
    assert model.correction(ONE, 16) < 1.25
    run(model, ONE, decode(16), 1.0, 10)
    assert model.correction(ONE, 16) == pytest.approx(1.0, abs=0.1)


def test_noise_does_not_bias(model):
    run(model, ONE, decode(16), 1.0, 400, noise=0.25)
    assert model.correction(ONE, 16) == pytest.approx(1.0, abs=0.12)


def test_an_unobserved_layout_takes_the_machines_part(model):
    run(model, ONE, decode(16), 2.0, 40)
    assert model.correction(FOUR, 16) == pytest.approx(2.0, rel=0.15)
    assert model.correction(ONE, 64) == pytest.approx(2.0, rel=0.1)


def test_one_wrong_layout_is_corrected_without_spoiling_the_others():
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


def test_a_correction_of_one_request_does_not_reach_a_large_batch_of_equal_total_context():
    def reading(layout, shape):
        return 1e-3 + 1e-7 * shape.context

    model = StepTimeModel.fit(make_profile(reading, layouts=(EIGHT,)))
    before = model.step(EIGHT, decode(64, 2000))
    for seed in range(10):
        run(model, EIGHT, decode(1), 2.0, 10, seed=seed)
        run(model, EIGHT, decode(64, 2000), 1.0, 10, seed=seed)
    assert model.correction(EIGHT, 1) > 1.8
    assert model.step(EIGHT, decode(64, 2000)) == pytest.approx(before, rel=0.08)


def test_corrections_stay_within_a_factor_of_eight(model):
    run(model, ONE, decode(4), 1000.0, 100)
    assert model.correction(ONE, 4) == pytest.approx(8.0, rel=0.01)
    run(model, ONE, decode(4), 1e-3, 100)
    assert model.correction(ONE, 4) == pytest.approx(1 / 8, rel=0.01)


def test_only_decode_steps_teach(model):
    for shape in (StepShape(4, 2048, 512, 300), StepShape(0, 0, 0, 300)):
        for _ in range(50):
            model.observe(ONE, shape, 100.0)
    assert model.correction(ONE, 4) == 1.0


def test_the_version_grows_with_corrections_that_matter(model):
    run(model, ONE, decode(16), 1.0, 50, noise=0.005)
    assert model.correction_version == 0
    run(model, ONE, decode(16), 1.5, 30, noise=0.005)
    grown = model.correction_version
    assert 1 <= grown <= 20
    run(model, ONE, decode(16), 1.5, 100, noise=0.005)
    assert model.correction_version <= grown + 2


def test_predictions_keep_up_with_the_corrections(model):
    plain = model.step(ONE, decode(16))
    for i in range(60):
        run(model, ONE, decode(16), 1.7, 1, seed=i)
        assert model.step(ONE, decode(16)) / plain == pytest.approx(model.correction(ONE, 16))

"""The linear base of step times: what drafts add, and what does not change without them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.predictor.step_base import StepBase
from pat_vllm.profiling.profile import StepSample, StepShape
from tests.support.mutation import mutated

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (1, 2, 4, 7)

PLAIN = [
    StepShape(b, b * each, each, 0, busy)
    for b in BATCHES
    for each in (128, 2048)
    for busy in (1, 4)
]
PREFILLS = [StepShape(0, 0, 0, tokens) for tokens in (64, 256, 1024)]
MISSES = [
    StepShape(b, b * 512, 512, 0, busy, 0, k) for b in BATCHES for k in LENGTHS for busy in (1, 4)
]
HITS = [dataclasses.replace(shape, drafts=shape.k * shape.batch) for shape in MISSES]


def truth(shape):
    """Verifying a draft token takes less than decoding one; looking for drafts takes 1 ms."""
    drafting = (1e-3 + 2e-5 * shape.batch) * (shape.k > 0)
    work = 1e-4 * shape.batch + 2e-8 * shape.context + 6e-5 * shape.prefill + 4e-5 * shape.drafts
    return 5e-3 + work * (1 + 0.1 * (shape.busy - 1)) + drafting


def fit(shapes, noise=0.0):
    rng = np.random.default_rng(0)
    times = [truth(shape) * float(np.exp(noise * rng.standard_normal())) for shape in shapes]
    return StepBase.fit(
        [
            StepSample.of(Layout(2, 1), shape, [time])
            for shape, time in zip(shapes, times, strict=True)
        ]
    )


def predicted(base, shape):
    extra = base.extra(shape.batch, shape.longest, shape.prefill, shape.busy, shape.drafts, shape.k)
    return base.decode(shape.batch, shape.context, shape.busy) + extra


def worst(base, shapes):
    return max(abs(predicted(base, shape) / truth(shape) - 1) for shape in shapes)


def check_drafts_are_learnt():
    base = fit(PLAIN + PREFILLS + MISSES + HITS, noise=0.02)
    assert worst(base, HITS + MISSES + PLAIN) < 0.06
    # A step in which few requests have drafts lies between the profiled ones.
    assert worst(base, [StepShape(32, 32 * 512, 512, 0, 1, 20, 4)]) < 0.05
    assert base.drafting == pytest.approx(1e-3, rel=0.2)
    assert base.drafts < 0.8 * base.prefill


def test_verifying_and_looking_for_drafts_are_learnt():
    check_drafts_are_learnt()


@pytest.mark.parametrize(
    "function, changes",
    [
        (StepBase.extra, {"drafts * (self.drafts + others": "drafts * 0 * (self.drafts + others"}),
        (StepBase.extra, {"(k > 0) * (self": "0 * (self"}),
        (StepBase.extra, {"batch * self.drafting_batch": "0"}),
        (StepBase.fit, {'"drafting": drafting,': '"drafting": 0 * drafting,'}),
    ],
)
def test_mistakes_about_drafts_are_seen(function, changes):
    with mutated(function, changes), pytest.raises(AssertionError):
        check_drafts_are_learnt()


def test_without_samples_drafts_count_as_prompt_tokens():
    base = fit(PLAIN + PREFILLS)
    for shape in HITS:
        as_prompt = base.extra(shape.batch, shape.longest, shape.drafts, shape.busy)
        total = predicted(base, shape) - base.decode(shape.batch, shape.context, shape.busy)
        assert total == pytest.approx(as_prompt)
        assert base.extra(8, 100, 0, 1, 0, shape.k) == base.extra(8, 100, 0, 1)


def test_samples_of_drafts_do_not_change_plain_steps():
    plain, both = fit(PLAIN + PREFILLS), fit(PLAIN + PREFILLS + MISSES + HITS)
    for shape in PLAIN:
        assert predicted(both, shape) == pytest.approx(predicted(plain, shape), rel=0.03)


def check_experts_are_learnt():
    """Of 64 experts, where a token goes to 4: all are read for a hundred tokens."""

    def with_experts(shape):
        tokens = shape.batch + shape.prefill + shape.drafts
        return truth(shape) + 20e-3 * (1 - (60 / 64) ** tokens)

    shapes = PLAIN + PREFILLS + MISSES + HITS
    samples = [StepSample.of(Layout(2, 1), shape, [with_experts(shape)]) for shape in shapes]
    base = StepBase.fit(samples, 4 / 64)
    assert base.experts == pytest.approx(20e-3, rel=0.1)
    for shape in shapes:
        assert predicted(base, shape) == pytest.approx(with_experts(shape), rel=0.07)


def test_experts_are_read_until_all_are():
    check_experts_are_learnt()
    assert fit(PLAIN + PREFILLS).experts == 0


@pytest.mark.parametrize(
    "function, changes",
    [
        (StepBase.decode, {"self.experts * (1 -": "0 * (1 -"}),
        (StepBase.extra, {"self.experts * (1 - self.chosen)": "0 * (1 - self.chosen)"}),
        (StepBase.extra, {"self.experts * (1 - self.chosen) ** batch": "self.experts"}),
        (StepBase.fit, {"** tokens": "** batch"}),
    ],
)
def test_mistakes_about_experts_are_seen(function, changes):
    with mutated(function, changes), pytest.raises(AssertionError):
        check_experts_are_learnt()


coefficients = st.floats(0, 1e-2)


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {
            field.name: coefficients
            for field in dataclasses.fields(StepBase)
            if field.name != "knees"
        }
    ),
    st.lists(st.tuples(st.sampled_from([4, 64, 256]), coefficients), max_size=3),
    st.tuples(*[st.integers(0, 500)] * 3, st.integers(1, 4), *[st.integers(0, 8)] * 2),
    st.integers(1, 300),
)
def test_every_kind_of_work_takes_time(values, knees, shape, more):
    base = StepBase(**values, knees=tuple(knees))
    before = base.extra(*shape)
    assert before >= 0
    for at in range(len(shape)):
        if at:  # the batch without its contexts is no step
            grown = [*shape[:at], shape[at] + more, *shape[at + 1 :]]
            assert base.extra(*grown) >= before * (1 - 1e-12)
    # k tells whether drafts are looked for, not how many.
    one, seven = ((*shape[:5], k) for k in (1, 7))
    assert base.extra(*one) == base.extra(*seven)
    arrays = [np.array([[one, one]]) for one in shape]
    assert base.extra(*arrays) == pytest.approx(np.full((1, 2), before))

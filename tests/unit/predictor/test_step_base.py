"""The linear base of step times: what drafts and experts add, and what does not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.predictor.steps.step_base import StepBase
from pat_vllm.profile import StepSample, StepShape
from tests.unit.predictor.examples import decode

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (1, 2, 4, 7)
PLAIN = [decode(b, each, busy) for b in BATCHES for each in (128, 2048) for busy in (1, 4)]
PREFILLS = [StepShape(0, 0, 0, tokens) for tokens in (64, 256, 1024)]
MISSES = [
    dataclasses.replace(decode(b, busy=busy), k=k)
    for b in BATCHES
    for k in LENGTHS
    for busy in (1, 4)
]
HITS = [dataclasses.replace(shape, drafts=shape.k * shape.batch) for shape in MISSES]
EVERY = PLAIN + PREFILLS + MISSES + HITS


def truth(shape: StepShape) -> float:
    """Verifying a draft token takes less than decoding one; looking for drafts takes 1 ms."""
    drafting = (1e-3 + 2e-5 * shape.batch) * (shape.k > 0)
    work = 1e-4 * shape.batch + 2e-8 * shape.context + 6e-5 * shape.prefill + 4e-5 * shape.drafts
    return 5e-3 + work * (1 + 0.1 * (shape.busy - 1)) + drafting


def with_passes(shape: StepShape) -> float:
    """A drafter's pass takes 1 ms, and reads a tenth of the KV."""
    each = 1e-3 + 2e-5 * shape.batch + 2e-9 * shape.context
    return truth(dataclasses.replace(shape, k=0)) + shape.k * each


def of_mixture(shape: StepShape) -> float:
    """Of 64 experts, where a token goes to 4: all are read for a hundred tokens."""
    tokens = shape.batch + shape.prefill + shape.drafts
    return truth(shape) + 20e-3 * (1 - (60 / 64) ** tokens)


def fit(
    shapes: Sequence[StepShape],
    seconds: Callable[[StepShape], float] = truth,
    noise: float = 0.0,
    chosen: float = 0.0,
    has_passes: bool = False,
) -> StepBase:
    rng = np.random.default_rng(0)
    samples = [
        StepSample.of(Layout(2, 1), shape, [seconds(shape) * float(np.exp(noise * rng.normal()))])
        for shape in shapes
    ]
    return StepBase.fit(samples, chosen, has_passes)


def predicted(base: StepBase, shape: StepShape) -> float:
    extra = base.extra(shape.batch, shape.longest, shape.prefill, shape.busy, shape.drafts)
    extra += base.making_drafts(shape.batch, shape.context, shape.k)
    return float(base.decode(shape.batch, shape.context, shape.busy) + extra)


def worst(
    base: StepBase, shapes: Sequence[StepShape], seconds: Callable[[StepShape], float] = truth
) -> float:
    return max(abs(predicted(base, shape) / seconds(shape) - 1) for shape in shapes)


def test_verifying_and_looking_for_drafts_are_learnt() -> None:
    base = fit(EVERY, noise=0.02)
    assert worst(base, HITS + MISSES + PLAIN) < 0.06
    # A step in which few requests have drafts lies between the profiled ones.
    assert worst(base, [dataclasses.replace(decode(32), drafts=20, k=4)]) < 0.05
    assert base.drafting == pytest.approx(1e-3, rel=0.2)
    assert base.drafts < 0.8 * base.prefill


def test_each_draft_of_a_drafter_with_weights_takes_a_pass() -> None:
    """Lengths that were not measured lie between those that were."""
    long = [dataclasses.replace(decode(8, 4096), k=7, drafts=56)]
    base = fit([s for s in EVERY if s.k in (0, 2, 7)] + long, with_passes, 0.02, has_passes=True)
    # What n-grams have only is left out: steps that make drafts and verify none.
    assert worst(base, PLAIN + HITS + long, with_passes) < 0.07
    assert base.drafting == pytest.approx(1e-3, rel=0.2)
    assert base.drafting_context > 0 == fit(EVERY).drafting_context


def test_without_samples_drafts_count_as_prompt_tokens() -> None:
    base = fit(PLAIN + PREFILLS)
    for shape in HITS:
        as_prompt = base.extra(shape.batch, shape.longest, shape.drafts, shape.busy)
        extra = predicted(base, shape) - base.decode(shape.batch, shape.context, shape.busy)
        assert extra == pytest.approx(as_prompt)
        assert base.making_drafts(8, 100, shape.k) == 0


def test_experts_are_read_until_all_are() -> None:
    base = fit(EVERY, of_mixture, chosen=4 / 64)
    assert base.experts == pytest.approx(20e-3, rel=0.1)
    assert worst(base, EVERY, of_mixture) < 0.07
    assert fit(PLAIN + PREFILLS).experts == 0


coefficients = st.floats(0, 1e-2)
NAMES = [field.name for field in dataclasses.fields(StepBase) if field.name != "knees"]


@given(
    st.fixed_dictionaries(dict.fromkeys(NAMES, coefficients)),
    st.lists(st.tuples(st.sampled_from([4, 64, 256]), coefficients), max_size=3),
    st.tuples(*[st.integers(0, 500)] * 3, st.integers(1, 4), st.integers(0, 8)),
    st.integers(1, 300),
)
def test_every_kind_of_work_takes_time(
    values: dict[str, float],
    knees: list[tuple[int, float]],
    shape: tuple[int, int, int, int, int],
    more: int,
) -> None:
    base = StepBase(**values, knees=tuple(knees))  # type: ignore[arg-type]
    before = base.extra(*shape)
    assert before >= 0
    for at in range(1, len(shape)):  # the batch without its contexts is no step
        grown = [*shape[:at], shape[at] + more, *shape[at + 1 :]]
        assert base.extra(*grown) >= before * (1 - 1e-12)
    # Of a search, k says whether it is made, not for how many.
    one, seven = (base.making_drafts(*shape[:2], k) for k in (1, 7))
    assert (seven >= one >= 0) if base.has_passes else seven == one
    assert base.making_drafts(*shape[:2], 0) == 0
    arrays = [np.array([[value, value]]) for value in shape]
    assert base.extra(*arrays) == pytest.approx(np.full((1, 2), before))

"""The length model: bounds, estimator, calibration, persistence."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator import shapes
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.predictor import learned_state
from pat_vllm.predictor.length_model import EDGES, LengthModel, cumulative_hazard, pool_of
from pat_vllm.predictor.state import LiveRequests
from tests.unit.predictor.calibration import Calibration, live_at, replay, tell
from tests.unit.predictor.examples import live_requests


def running(generated: list[int], bound: Any, exact: Any = False) -> LiveRequests:
    return live_requests([10] * len(generated), generated, bound, exact)


def survival_of(model: LengthModel, lengths: Any) -> Any:
    """Share of responses that are longer than each of `lengths`, as the model sees it now."""
    model._refresh()
    return np.exp(-np.interp(lengths, model._edges, model._hazard))


def learnt(bound: int, *batches: LengthTrace) -> LengthModel:
    """A model that has seen these batches."""
    model = LengthModel(bound)
    for batch in batches:
        for index in range(len(batch)):
            tell(model, batch, index)
        model.end_of_batch()
    return model


# Estimator


def test_kaplan_meier_by_hand() -> None:
    lengths = np.array([2, 3, 4, 4, 5, 7])
    ended = np.array([True, False, True, True, False, True])
    survival = np.exp(-cumulative_hazard(pool_of(lengths, ended)))
    assert EDGES[:9].tolist() == [*range(9)] and (EDGES[17:] / EDGES[16:-1] < 1.07).all()
    # At risk: 6 at 2, 5 at 3, 4 at 4, 2 at 5, 1 at 7.
    expected = [1, 1, 5 / 6, 5 / 6, 5 / 6 * 2 / 4, 5 / 12, 5 / 12, 0]
    np.testing.assert_allclose(survival[:8], expected, atol=1e-11)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=50),
    st.integers(1, 60),
)
def test_responses_are_pooled_one_by_one_or_at_once(
    responses: list[tuple[int, bool]], at_once: int
) -> None:
    lengths, ended = (np.array(values) for values in zip(*responses, strict=True))
    pool, model = pool_of(lengths, ended), LengthModel(8192)
    with patch("pat_vllm.predictor.length_model._AT_ONCE", at_once):
        for length, end in responses:
            model.finished(length, end)
            assert len(model._stopped) < at_once, "memory is bounded"
    model.end_of_batch()
    np.testing.assert_array_equal(pool, model.history)
    assert pool[1].sum() == lengths.sum()
    assert (pool[0] <= pool[1]).all()


def test_lengths_alike_have_a_short_tail() -> None:
    """Of as many responses as were seen, less than one is expected to be far longer than them."""
    model = LengthModel(16384)
    lengths = range(940, 1061)
    for length in lengths:
        model.finished(length, complete=True)
    model.end_of_batch()
    assert len(lengths) * survival_of(model, 1.1 * lengths[-1]) < 1
    assert survival_of(model, lengths[0] - 1) > 0.95


def test_a_small_bound_is_not_an_end() -> None:
    model = LengthModel(8192)
    for _ in range(600):
        model.finished(500, complete=False)
    model.end_of_batch()
    assert survival_of(model, 500) > 0.95


# Samples


@settings(max_examples=40)
@given(bound=st.sampled_from([8, 2048, 131072]), futures=st.integers(1, 20), data=st.data())
def test_samples_are_within_bounds_and_repeatable(
    bound: int, futures: int, data: st.DataObject
) -> None:
    model, other = LengthModel(bound), LengthModel(bound)
    response = st.tuples(st.integers(0, 2 * bound), st.booleans())
    for _ in range(data.draw(st.integers(1, 3))):
        for length, complete in data.draw(st.lists(response, max_size=30)):
            for predictor in (model, other):
                predictor.finished(length, complete)
        for predictor in (model, other):
            predictor.end_of_batch()
    requests = st.tuples(st.integers(0, bound - 1), st.integers(bound, 4 * bound), st.booleans())
    generated, bounds, exact = [
        list(values)
        for values in zip(*data.draw(st.lists(requests, min_size=1, max_size=20)), strict=True)
    ]
    live = running(generated, bounds, exact)
    for predictor in (model, other):
        predictor.observe_running(live)
    remaining = model.sample(live, futures)
    assert remaining.shape == (len(live), futures) and remaining.dtype == np.int64
    room = (live.max_tokens - live.num_output_tokens)[:, None]
    assert (remaining >= 1).all() and (remaining <= room).all()
    assert (remaining == room)[live.exact].all()
    np.testing.assert_array_equal(remaining, model.sample(live, futures))
    np.testing.assert_array_equal(remaining, other.sample(live, futures))
    survival = survival_of(model, np.arange(0, 2 * bound, max(1, bound // 50)))
    assert survival[0] == 1 and (np.diff(survival) <= 0).all() and (survival >= 0).all()


def test_samples_follow_the_survival_are_stratified_and_futures_exchangeable() -> None:
    model = learnt(8192, *(shapes.lognormal(256, 800, 0.8, 8192, seed) for seed in range(4)))
    remaining = model.sample(running([400] * 2000, 8192), 16)
    for ahead in (1, 100, 400, 1600):
        expected = survival_of(model, 400 + ahead) / survival_of(model, 400)
        assert (remaining > ahead).mean() == pytest.approx(expected, abs=0.02)
    remaining = model.sample(running([0] * 512, 8192), 16)
    assert np.median(remaining, axis=1).std() < 0.2 * remaining.std()
    assert remaining.mean(axis=0).std() < 0.15 * remaining.mean()
    assert len(np.unique(np.argmax(remaining, axis=1))) == 16


def test_without_data_what_ran_long_runs_long() -> None:
    model = LengthModel(24576)
    assert 0.4 < survival_of(model, 24576 / 8) < 0.6
    samples = [model.sample(running([length] * 64, 131072), 64) for length in (10, 3000, 12000)]
    assert samples[0].mean() < samples[1].mean() < samples[2].mean()
    assert 6000 < np.median(samples[2]) < 24000, "about as much again"


def test_what_runs_is_seen_unless_its_length_is_prescribed() -> None:
    early = live_at(shapes.lognormal(128, 4000, 0.3, 16384), 2000)
    model = LengthModel(16384)
    before = survival_of(model, 2000)
    model.observe_running(running([2000] * 100, 4096, exact=True))
    assert survival_of(model, 2000) == before
    model.observe_running(early)
    once = survival_of(model, 2000)
    assert once > before
    model.observe_running(early)
    assert survival_of(model, 2000) == once, "replaced, not added"


def test_empty_and_aborted_batches_change_nothing_and_single_requests_add_up() -> None:
    model = learnt(1000, shapes.uniform(64, 10, 900, 1000))
    before = survival_of(model, np.arange(1000))
    model.end_of_batch()
    model.finished(0, False)
    model.end_of_batch()
    assert (model.batches, model.responses) == (1, 64)
    np.testing.assert_array_equal(survival_of(model, np.arange(1000)), before)
    assert model.sample(running([], 1), 16).shape == (0, 16)
    model = LengthModel(8192)
    for length in shapes.lognormal(300, 300, 0.5, 8192).lengths:
        model.finished(length, True)
        model.end_of_batch()
    assert survival_of(model, 300) == pytest.approx(0.5, abs=0.12)


# Calibration


@pytest.mark.parametrize(
    "batches",
    [
        [shapes.uniform(128, 500, 4000, 8192, seed) for seed in range(12)],
        [shapes.deepscaler(seed=seed) for seed in range(12)],
        shapes.shifted([500 * 1.1**number for number in range(12)], 128, 0.8, 32768),
    ],
    ids=["uniform", "deepscaler", "drift"],
)
def test_calibrated_after_three_batches(batches: list[LengthTrace]) -> None:
    calibrations = replay(batches)
    later = Calibration.mean(calibrations[3:])
    assert 0.74 < later.coverage_80 < 0.86
    assert 0.7 < later.live_coverage < 1
    assert later.live_error < 0.025
    assert calibrations[0].live_error < 0.12


# Persistence


def test_history_survives_saving(tmp_path: Path) -> None:
    model = learnt(16384, *(shapes.grpo(16, 8, 0.5, 1.0, seed=seed) for seed in range(3)))
    path = tmp_path / "history.json"
    path.write_text(learned_state.to_json(model))
    assert list(tmp_path.iterdir()) == [path]
    loaded, _ = learned_state.load(path)
    assert (loaded.batches, loaded.responses) == (3, 384)
    live = running([10, 2000], 16384)
    np.testing.assert_array_equal(loaded.sample(live, 16), model.sample(live, 16))
    for bound in (8, 131072):
        other, _ = learned_state.load(path, bound)
        assert other.bound == bound
        np.testing.assert_allclose(survival_of(other, 1000), survival_of(model, 1000), atol=0.03)


def test_a_response_longer_than_the_bound_counts() -> None:
    model = learnt(100, shapes.uniform(64, 10, 90))
    before = survival_of(model, 50)
    model.finished(5000, True)
    assert model.sample(running([6000], 50000), 4).max() <= 44000
    assert survival_of(model, 50) == pytest.approx(before, abs=0.05)

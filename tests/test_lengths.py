"""The length model: bounds, estimator, calibration, persistence."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.calibration_plot import calibration, calibration_figure, live_at, replay, tell
from pat_vllm.predictor import kept
from pat_vllm.predictor.hazard import EDGES, Pool, cumulative_hazard
from pat_vllm.predictor.lengths import LengthModel
from pat_vllm.predictor.state import LiveRequests
from pat_vllm.simulator import traces
from pat_vllm.simulator.traces import LengthTrace


def make_live(
    generated: Sequence[int],
    bound: Sequence[int] | int,
    exact: Sequence[bool] | bool = False,
    group: Sequence[int] | None = None,
) -> LiveRequests:
    count = len(generated)
    return LiveRequests(
        num_prompt_tokens=np.full(count, 10, np.int64),
        num_output_tokens=np.array(generated, np.int64),
        max_tokens=np.broadcast_to(np.array(bound, np.int64), count),
        exact=np.broadcast_to(np.array(exact, np.bool_), count),
        group=np.arange(count, dtype=np.int64) if group is None else np.array(group, np.int64),
        replica=np.zeros(count, np.int64),
        num_computed_tokens=np.zeros(count, np.int64),
    )


def survival_of(model: LengthModel, lengths: Any) -> Any:
    """Share of responses that are longer than each of `lengths`, as the model sees it now."""
    model._refresh()
    return np.exp(-np.interp(lengths, EDGES, model._hazard))


def learn(model: LengthModel, batch: LengthTrace) -> None:
    for index in range(len(batch)):
        tell(model, batch, index)
    model.end_of_batch()


# Estimator


def test_the_grid_is_exact_for_short_lengths_and_covers_long_ones() -> None:
    assert EDGES[:17].tolist() == list(range(17)) and EDGES[-1] == 1 << 22
    assert (np.diff(EDGES) >= 1).all() and (EDGES[17:] / EDGES[16:-1] < 1.15).all()
    assert len(EDGES) < 180


def test_kaplan_meier_by_hand() -> None:
    lengths = np.array([2, 3, 4, 4, 5, 7])
    ended = np.array([True, False, True, True, False, True])
    pool = Pool.of(lengths, ended)
    survival = np.exp(-cumulative_hazard(pool))
    # At risk: 6 at 2, 5 at 3, 4 at 4, 2 at 5, 1 at 7.
    expected = [1, 1, 5 / 6, 5 / 6, 5 / 6 * 2 / 4, 5 / 12, 5 / 12, 0]
    np.testing.assert_allclose(survival[:8], expected, atol=1e-11)


@given(st.lists(st.tuples(st.integers(0, 5000), st.booleans()), min_size=1, max_size=50))
def test_collecting_one_by_one_or_at_once(responses: list[tuple[int, bool]]) -> None:
    lengths = np.array([length for length, _ in responses])
    ended = np.array([end for _, end in responses]) & (lengths > 0)
    pool = Pool.of(lengths, ended)
    single = Pool.empty()
    for length, end in zip(lengths, ended, strict=True):
        single = single + Pool.of(np.array([length]), np.array([end]))
    np.testing.assert_allclose(pool.tokens, single.tokens)
    np.testing.assert_allclose(pool.ends, single.ends)
    assert pool.tokens.sum() == lengths.sum()
    assert (pool.ends <= pool.tokens).all()


def test_heavy_censoring_is_unbiased() -> None:
    random = np.random.default_rng(0)
    lengths = np.maximum(1, np.round(1000 * np.exp(random.standard_normal(20000))))
    cut = random.integers(1, 3000, len(lengths))
    ended = lengths <= cut
    assert 0.3 < ended.mean() < 0.7
    seen = np.minimum(lengths, cut).astype(np.int64)
    hazard = cumulative_hazard(Pool.of(seen, ended))
    for length in (100, 500, 1000, 2000):
        survival = np.exp(-np.interp(length, EDGES, hazard))
        assert survival == pytest.approx((lengths > length).mean(), abs=0.02)


def test_small_bound_is_not_an_end() -> None:
    model = LengthModel(8192)
    for _ in range(3):
        for _response in range(200):
            model.finished(500, complete=False)
        model.end_of_batch()
    assert survival_of(model, 500) > 0.95


# Samples


@settings(max_examples=60, deadline=None)
@given(
    bound=st.sampled_from([8, 100, 2048, 131072]),
    futures=st.integers(1, 20),
    data=st.data(),
)
def test_samples_are_within_bounds(bound: int, futures: int, data: st.DataObject) -> None:
    model = LengthModel(bound, seed=3)
    other = LengthModel(bound, seed=3)
    response = st.tuples(st.integers(0, 2 * bound), st.booleans())
    for _ in range(data.draw(st.integers(1, 3))):
        for length, complete in data.draw(st.lists(response, max_size=30)):
            model.finished(length, complete)
            other.finished(length, complete)
        model.end_of_batch()
        other.end_of_batch()
    running = data.draw(
        st.lists(
            st.tuples(st.integers(0, bound - 1), st.integers(bound, 4 * bound), st.booleans()),
            max_size=20,
        )
    )
    live = make_live(
        [each[0] for each in running],
        [each[1] for each in running],
        [each[2] for each in running],
        [index % 4 for index in range(len(running))],
    )
    model.observe_running(live)
    other.observe_running(live)
    remaining = model.sample(live, futures)
    assert remaining.shape == (len(running), futures) and remaining.dtype == np.int64
    room = (live.max_tokens - live.num_output_tokens)[:, None]
    assert (remaining >= 1).all() and (remaining <= room).all()
    assert (remaining == room)[live.exact].all()
    np.testing.assert_array_equal(remaining, model.sample(live, futures))
    np.testing.assert_array_equal(remaining, other.sample(live, futures))
    survival = survival_of(model, np.arange(0, 2 * bound, max(1, bound // 50)))
    assert survival[0] == 1 and (np.diff(survival) <= 0).all() and (survival >= 0).all()


def test_samples_follow_the_survival() -> None:
    model = LengthModel(8192)
    for seed in range(4):
        learn(model, traces.lognormal(256, 800, 0.8, 8192, seed))
    remaining = model.sample(make_live([400] * 2000, 8192), 16)
    for ahead in (1, 100, 400, 1600):
        expected = survival_of(model, 400 + ahead) / survival_of(model, 400)
        assert (remaining > ahead).mean() == pytest.approx(expected, abs=0.02)


def test_samples_are_stratified_and_futures_exchangeable() -> None:
    model = LengthModel(8192)
    for seed in range(4):
        learn(model, traces.lognormal(256, 800, 0.8, 8192, seed))
    remaining = model.sample(make_live([0] * 512, 8192), 16)
    medians = np.median(remaining, axis=1)
    assert medians.std() < 0.2 * remaining.std()
    assert remaining.mean(axis=0).std() < 0.15 * remaining.mean()
    assert len(np.unique(np.argmax(remaining, axis=1))) == 16


def test_a_seed_changes_the_futures() -> None:
    live = make_live([100] * 8, 8192)
    first, second = (LengthModel(8192, seed).sample(live, 16) for seed in (0, 1))
    assert (first != second).any()


def test_without_data_what_ran_long_runs_long() -> None:
    model = LengthModel(24576)
    assert 0.4 < survival_of(model, 24576 / 8) < 0.6
    means = [
        model.sample(make_live([length] * 64, 131072), 64).mean() for length in (10, 3000, 12000)
    ]
    assert means[0] < means[1] < means[2]
    # About as much again.
    median = np.median(model.sample(make_live([12000] * 64, 131072), 64))
    assert 6000 < median < 24000


def test_first_batch_follows_its_running_responses() -> None:
    batch = traces.lognormal(128, 4000, 0.3, 16384)
    model = LengthModel(16384)
    early = live_at(batch, 2000)
    before = model.sample(early, 16).mean()
    model.observe_running(early)
    assert model.sample(early, 16).mean() > before
    # Replaced, not added.
    again = survival_of(model, 2000)
    model.observe_running(early)
    assert survival_of(model, 2000) == again


def test_exact_requests_teach_nothing() -> None:
    model = LengthModel(4096)
    before = survival_of(model, np.arange(4096))
    model.observe_running(make_live([3000] * 100, 4096, exact=True))
    np.testing.assert_array_equal(survival_of(model, np.arange(4096)), before)


# Calibration


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: traces.lognormal(128, 1000, 1.0, 16384, seed),
        lambda seed: traces.two_mode(128, seed=seed),
        lambda seed: traces.uniform(128, 500, 4000, max_tokens=8192, seed=seed),
        lambda seed: traces.deepscaler(seed=seed),
        lambda seed: traces.grpo(16, 8, 0.7, 0.7, seed=seed),
    ],
    ids=["log-normal", "two modes", "uniform", "deepscaler", "grpo"],
)
def test_calibrated_after_three_batches(make: Callable[[int], LengthTrace]) -> None:
    batches = [make(seed) for seed in range(12)]
    predictions = replay(batches)
    learnt = [one for one in predictions if one.batch >= 3 or one.batch == 0]
    result = calibration(batches, learnt)
    assert result.later is not None
    assert 0.74 < result.later.coverage_80 < 0.86
    assert 0.7 < result.later.live_coverage < 1
    assert result.later.live_error < 0.025
    assert result.first.live_error < 0.12


def test_drift_is_followed() -> None:
    medians = [500 * 1.1**number for number in range(20)]
    batches = traces.shifted(medians, 128, 0.8, 32768)
    later = [one for one in replay(batches) if one.batch >= 10 or one.batch == 0]
    result = calibration(batches, later).later
    assert result is not None
    assert 0.7 < result.coverage_80 < 0.9
    assert result.live_error < 0.03


# Persistence


def test_history_survives_saving(tmp_path: Path) -> None:
    model = LengthModel(16384)
    for seed in range(3):
        learn(model, traces.grpo(16, 8, 0.5, 1.0, seed=seed))
    path = tmp_path / "history.json"
    kept.save(path, model)
    assert list(tmp_path.iterdir()) == [path]
    loaded, _ = kept.load(path)
    assert (loaded.batches, loaded.responses) == (3, 384)
    live = make_live([10, 2000], 16384)
    np.testing.assert_array_equal(loaded.sample(live, 16), model.sample(live, 16))
    for bound in (8, 131072):
        other, _ = kept.load(path, bound)
        assert other.bound == bound
        np.testing.assert_allclose(survival_of(other, 1000), survival_of(model, 1000), atol=0.03)


def test_a_response_longer_than_the_bound_counts() -> None:
    model = LengthModel(100)
    learn(model, traces.uniform(64, 10, 90))
    before = survival_of(model, 50)
    model.finished(5000, True)
    assert model.sample(make_live([6000], 50000), 4).max() <= 44000
    assert survival_of(model, 50) == pytest.approx(before, abs=0.05)
    model.end_of_batch()
    assert survival_of(LengthModel.from_json(model.to_json()), 50) == survival_of(model, 50)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"format": 9}', '{"format": 1, "bound": 8}', b"\xff\xfe", "null"],
)
def test_corrupt_history_names_the_file(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"history\.json holds no length history"):
        kept.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"ends": [-1.0]},
        {"ends": [float("nan")]},
        {"tokens": []},
        {"batches": -1},
        {"bound": 0},
        {"ends": "many"},
    ],
)
def test_history_out_of_range(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        LengthModel.from_json({**LengthModel(100).to_json(), **change})


def test_bound_must_be_positive() -> None:
    with pytest.raises(ValueError, match="bound=0"):
        LengthModel(0)


# Smaller matters


def test_empty_and_aborted_batches_change_nothing() -> None:
    model = LengthModel(1000)
    learn(model, traces.uniform(64, 10, 900, 1000))
    before = survival_of(model, np.arange(1000))
    model.end_of_batch()
    model.finished(0, False)
    model.end_of_batch()
    assert (model.batches, model.responses) == (1, 64)
    np.testing.assert_array_equal(survival_of(model, np.arange(1000)), before)
    assert model.sample(make_live([], 1), 16).shape == (0, 16)


def test_single_requests_add_up() -> None:
    model = LengthModel(8192)
    for length in traces.lognormal(300, 300, 0.5, 8192).lengths:
        model.finished(length, True)
        model.end_of_batch()
    assert survival_of(model, 300) == pytest.approx(0.5, abs=0.12)


def calls_of(function: Callable[[], object]) -> int:
    """Function calls, Python's and C's, that a call makes: its work, on any machine."""
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def told_of(responses: int) -> LengthModel:
    """A model in the middle of a batch, after so many responses."""
    model = LengthModel(16384)
    for index in range(responses):
        model.finished(1 + index % 5000, True)
    return model


def test_memory_is_bounded() -> None:
    sizes = [len(pickle.dumps(told_of(responses))) for responses in (1, 5_000, 20_000)]
    assert max(sizes) < 1.01 * min(sizes)


def test_a_finished_response_takes_as_little_work_after_many() -> None:
    few, many = told_of(10), told_of(20_000)
    work = calls_of(lambda: few.finished(100, True))
    assert work == calls_of(lambda: many.finished(100, True)) < 20


def test_predictions_make_as_many_calls_for_many_requests() -> None:
    """Arrays do the work: no loop over requests, futures or tokens."""
    model = told_of(2_000)
    model.end_of_batch()
    for index in range(500):
        model.finished(1 + index % 5000, True)

    def predict(live: LiveRequests) -> None:
        model.observe_running(live)
        model.sample(live, 16)

    few, many = (make_live([100] * count, 16384, group=[0] * count) for count in (8, 512))
    for live in (few, many):
        predict(live)  # draws and grids are kept
    assert calls_of(lambda: predict(few)) == calls_of(lambda: predict(many)) < 500


def test_calibration_figure(tmp_path: Path) -> None:
    path = tmp_path / "calibration.png"
    batches = [traces.deepscaler(seed=seed) for seed in range(3)]
    result = calibration_figure(batches, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert result.later is not None and result.later.live_error < 0.05
    only = calibration_figure(batches[:1], tmp_path / "first.svg")
    assert only.later is None and only.first.live_error < 0.12

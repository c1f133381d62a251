"""Profiles: samples, files, and the cache."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.profile import Profile, ProfileError, StepSample, StepShape, thinned
from pat_vllm.profiling import cache as profile_cache
from tests.unit.predictor.examples import profile_of, switch_sample

KEY = {"model": {"hidden_size": 8}, "ranks": 2}
ONE, TWO = Layout(1, 2), Layout(2, 1)


def step(layout: Layout = ONE, **values: Any) -> StepSample:
    defaults = dict(batch=1, context=8, longest=8, seconds=0.1, low=0.1, high=0.1, repeats=3)
    return StepSample(layout=layout, **{**defaults, **values})


BOTH = (step(ONE), step(TWO))


def profile(key: dict[str, Any] = KEY, **values: Any) -> Profile:
    defaults = {"layouts": (ONE, TWO), "steps": BOTH, "kind": "measured", "key": key}
    return profile_of(**defaults | values)


@settings(max_examples=30)
@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=60))
def test_a_sample_of_measured_times(times: list[float]) -> None:
    """It keeps some of them, evenly spread; the first and the last are among them."""
    shape = StepShape(4, 100, 30, 0, 2, drafts=8, k=2)
    sample = StepSample.of(TWO, shape, times)
    assert sample.shape == shape and sample.repeats == len(times)
    assert (sample.low, sample.high) == (min(times), max(times))
    assert sample.seconds == statistics.median(times)
    assert StepSample.model_validate_json(sample.model_dump_json()) == sample
    if len(times) == 1:
        assert sample.times == ()
        return
    places = [int(place) for place in thinned([float(i) for i in range(len(times))])]
    assert sample.times == tuple(times[place] for place in places)
    assert len(places) == min(len(times), 16)
    assert (places[0], places[-1]) == (0, len(times) - 1)
    gaps = {b - a for a, b in itertools.pairwise(places)}
    assert min(gaps) >= max(1, max(gaps) - 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: profile(layouts=(TWO, ONE)), "must ascend in tp"),
        (lambda: profile(layouts=(ONE, TWO, TWO)), "without repeats"),
        (lambda: profile(ranks=4), "is not one of 4 ranks"),
        (lambda: profile(max_num_seqs={1: 4}), "max_num_seqs has no entry for tp=2"),
        (lambda: profile(steps=(step(ONE),)), "no decode step of layout tp2dp1"),
        (lambda: profile(steps=(*BOTH, step(Layout(4, 1)))), "is not among layouts"),
        (lambda: step(times=(0.1,) * 17), "at most 16 items"),
    ],
)
def test_profiles_and_samples_are_consistent(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_file_has_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    switches = (switch_sample(ONE, TWO, 3, 8, 0.1),)
    expected = profile({**KEY, "layouts": ["tp1dp2", "tp2dp1"]}, switches=switches)
    expected.save(path)
    assert Profile.load(path) == expected
    content = json.loads(path.read_text())
    for wrong in ({**content, "format": 1}, {**content, "colour": 1}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ProfileError, match=r"profile\.json: (format|colour).*make it again"):
            Profile.load(path)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_damaged_or_unwritable_cache_is_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = profile_cache.keep(profile())
    assert path is not None
    whole, other = path.read_text(), cache / "other.json"
    profile({"ranks": 2}).save(other)
    for content in ("", "{", whole.replace("0.1", "-0.1"), other.read_text()):
        path.write_text(content)
        caplog.clear()
        assert profile_cache.find(KEY) is None
        assert str(path) in caplog.text
    path.unlink()
    path.mkdir()
    assert profile_cache.keep(profile()) is None
    assert "PAT_CACHE_DIR" in caplog.text

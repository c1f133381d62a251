"""The predictor policy of a mixture: a profile of both kinds of layouts, a choice among them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import pat_vllm
from pat_vllm.layout import Layout
from pat_vllm.profiling import cache as profile_cache
from pat_vllm.profiling.profile import Profile
from tests.engines import engine, run, scheduler_of
from tests.test_default_policy import Believing, biased, long_tail, settle

pytestmark = pytest.mark.slow

CUT, SPREAD = Layout(2, 1), Layout(2, 1, "ep")
LAYOUTS = (Layout(1, 2), CUT, SPREAD)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv(profile_cache.CACHE_DIR, str(path))
        yield path


@pytest.fixture(scope="module")
def llm(profile: Path) -> Iterator[Any]:
    pat = {"policy": {"kind": "predictor"}, "weights": "inplace"}
    with engine("qwen3_moe", 2, pat) as llm:
        yield llm


def test_the_profile_has_both_kinds(llm: Any, profile: Path) -> None:
    (path,) = profile.rglob("*.json")
    taken = Profile.load(path)
    assert taken.layouts == tuple(pat_vllm.report(llm).layouts) == LAYOUTS
    assert {sample.layout for sample in taken.steps} == {*LAYOUTS}
    assert {(one.source, one.target) for one in taken.switches} == {*permutations(LAYOUTS, 2)}
    assert taken.experts == (8, 2)


@pytest.mark.parametrize("fast", [CUT, SPREAD])
def test_the_faster_kind_is_chosen(
    llm: Any, profile: Path, monkeypatch: pytest.MonkeyPatch, fast: Layout
) -> None:
    """By a profile in which one of them is fast for few requests."""
    scheduler = scheduler_of(llm)
    taken = Profile.load(next(iter(profile.rglob("*.json"))))
    policy = Believing(biased(taken, LAYOUTS[0], fast, batch=6))
    monkeypatch.setattr(scheduler.monitor, "policy", policy)
    monkeypatch.setattr(scheduler.controller.costs, "mode", "migrate")
    jobs = long_tail(seed=3)
    before = len(pat_vllm.report(llm).switches)
    outcomes = run(llm, jobs, before_step=settle)
    made = [one for one in pat_vllm.report(llm).switches[before:] if one.reason == "policy"]
    assert made and made[-1].target == fast

    pat_vllm.switch(llm, tp=1)
    static = run(llm, jobs)
    assert {k: o.token_ids for k, o in static.items()} == {
        k: o.token_ids for k, o in outcomes.items()
    }

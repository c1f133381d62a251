"""An engine with no PAT options: the predictor policy decides in it, by a profile of its own."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import pat_vllm
from pat_vllm import files
from pat_vllm.layout import Layout
from pat_vllm.metrics import names
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.policy import SETTLE_SECONDS
from pat_vllm.profiling import cache as profile_cache
from pat_vllm.profiling.profile import Profile, StepShape
from tests.engines import Job, engine, run, scheduler_of, teacher_forced
from tests.test_metrics import samples, series

pytestmark = pytest.mark.slow

MODEL = "qwen3"
REPLICAS, GROUP = Layout(1, 2), Layout(2, 1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv(profile_cache.CACHE_DIR, str(path))
        yield path


@pytest.fixture(scope="module")
def llm(cache: Path) -> Iterator[Any]:
    with engine(MODEL, 2, {"policy": {"kind": "predictor"}}, disable_log_stats=False) as llm:
        yield llm


def long_tail(seed: int = 0, ignore_eos: bool = True) -> dict[str, Job]:
    """Twelve greedy requests; two of them run on alone."""
    rng = random.Random(seed)
    return {
        f"{seed}-{i}": Job(
            [rng.randrange(5, 400) for _ in range(rng.randint(4, 40))],
            {
                "max_tokens": 150 + i if i < 2 else rng.randint(20, 30),
                "temperature": 0.0,
                "ignore_eos": ignore_eos,
                "logprobs": 0,
            },
        )
        for i in range(12)
    }


def settle(step: int) -> None:
    """The policy waits until no request has arrived for a while."""
    if step == 1:
        time.sleep(2 * SETTLE_SECONDS)


def biased(profile: Profile, home: Layout, few: Layout, batch: int) -> Profile:
    """Says that `few` is by far the fastest layout below `batch` requests, and `home` from there.

    Steps take a hundred times as long as they were measured, so that no switch is too dear.
    """

    def factor(layout: Layout, requests: int) -> float:
        if layout == home or not requests:
            return 100.0
        return 2.0 if layout == few and requests < batch else 5000.0

    steps = tuple(
        one.model_copy(
            update={
                name: getattr(one, name) * factor(one.layout, one.batch)
                for name in ("seconds", "low", "high")
            }
        )
        for one in profile.steps
    )
    return profile.model_copy(update={"steps": steps})


class Believing(AdaptivePolicy):
    """Finds that each step takes what the profile says, however long it took here.

    A profile that is wrong on purpose would be corrected by the steps, sooner or later by how fast
    the machine is.
    """

    def __init__(self, profile: Profile) -> None:
        # By a timer that stands still, or it would plan too seldom for steps of milliseconds.
        super().__init__(profile, bound=512, timer=lambda: 0.0)

    def stepped(self, now: float, layout: Layout, shape: StepShape, seconds: float) -> None:
        super().stepped(now, layout, shape, self._steps.step(layout, shape))


def test_it_profiles_plans_and_reports(llm: Any, cache: Path) -> None:
    (path,) = cache.rglob("*.json")
    profile = Profile.load(path)
    assert profile.kind == "measured" and profile.layouts == (REPLICAS, GROUP)
    assert {sample.layout for sample in profile.steps} == {REPLICAS, GROUP}
    assert {(one.source, one.target) for one in profile.switches} == {
        (REPLICAS, GROUP),
        (GROUP, REPLICAS),
    }

    jobs = long_tail()
    outcomes = run(llm, jobs, before_step=settle)
    assert {len(one.token_ids) for one in outcomes.values()} == {
        job.sampling["max_tokens"] for job in jobs.values()
    }
    report = pat_vllm.report(llm).predictor
    assert report.plans > 0 and 0 < report.slowest_plan <= report.planning
    # Which layout is the faster one for so small a model is the machine's affair.
    # How many steps are compared with their predictions, too: that is bounded by the time it takes.
    assert sum(count for count, _ in report.step_error.values()) > 0
    (saved,) = report.savings
    assert saved.layout == REPLICAS and saved.predicted.fixed > 0
    assert 0 < saved.realised.drafting == saved.realised.switching, "it has no drafts"


def test_the_metrics_say_what_was_saved(llm: Any) -> None:
    run(llm, long_tail(seed=4), before_step=settle)
    savings = pat_vllm.report(llm).predictor.savings
    # An engine in this process tells it with its next step.
    run(llm, {"next": Job([5, 7], {"max_tokens": 2, "ignore_eos": True})})
    found = samples()
    assert found[series(names.BATCHES)] == len(savings) > 0
    for estimate, way in product(names.ESTIMATES, names.WAYS):
        seconds = sum(getattr(getattr(one, estimate), way) for one in savings)
        shown = found[series(names.BATCH_SECONDS, estimate=estimate, way=way)]
        assert shown == pytest.approx(seconds)


def test_its_switches_are_those_of_its_decisions_and_keep_the_outputs(
    llm: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a profile by which one group is slow for many requests and fast for few."""
    scheduler = scheduler_of(llm)
    profile = biased(Profile.load(next(iter(cache.rglob("*.json")))), REPLICAS, GROUP, batch=6)
    monkeypatch.setattr(scheduler.monitor, "policy", Believing(profile))
    # Or it would go by rates measured at start, and may find recomputing these contexts cheaper.
    monkeypatch.setattr(scheduler.controller.costs, "mode", "migrate")
    jobs = long_tail(seed=1)
    outcomes = run(llm, jobs, before_step=settle)
    report = pat_vllm.report(llm)
    fired = [one for one in report.predictor.decisions if one.fired]
    made = [one for one in report.switches if one.reason == "policy"]
    made = made[-len(fired) :]
    assert [(one.source, one.target) for one in made] == [(one.layout, one.target) for one in fired]
    assert all(one.real_cost is not None for one in fired)
    # Where it begins is up to what it learnt in the batch before; the few are for the group.
    assert fired and made[-1].target == GROUP
    assert made[-1].migrated > 0 and made[-1].tokens > 0

    monkeypatch.setattr(scheduler.monitor, "policy", Believing(profile))
    pat_vllm.switch(llm, tp=1)
    assert {k: o.token_ids for k, o in run(llm, jobs).items()} == {
        k: o.token_ids for k, o in outcomes.items()
    }
    pat_vllm.switch(llm, tp=1)
    scores = teacher_forced(llm, {k: (jobs[k].prompt, o.token_ids) for k, o in outcomes.items()})
    for name, outcome in outcomes.items():
        assert scores[name] == pytest.approx(outcome.logprobs, abs=1e-4)


def test_fixed_lengths_are_known_and_not_learnt_from(llm: Any) -> None:
    """`ignore_eos` says how long a response will be, and nothing about others."""
    scheduler = scheduler_of(llm)
    before = pat_vllm.report(llm).predictor.responses
    seen = []

    def look(step: int) -> None:
        if step == 3:
            seen.append(scheduler.monitor.requests.arrays())

    run(llm, long_tail(seed=2), before_step=look)
    (live,) = seen
    assert len(live) == 12 and live.exact.all()
    assert set(live.max_tokens) == {
        job.sampling["max_tokens"] for job in long_tail(seed=2).values()
    }
    assert (live.num_output_tokens <= live.max_tokens).all() and (
        live.num_computed_tokens <= live.context
    ).all()
    assert set(live.replica) <= {0, 1}
    assert pat_vllm.report(llm).predictor.responses == before

    run(llm, long_tail(seed=3, ignore_eos=False))
    report = pat_vllm.report(llm).predictor
    assert report.responses == before + 12 and report.batches == 1


def test_a_full_disk_stops_no_rollout(
    llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are learnt all the same; the file is as it was."""
    path = tmp_path / "lengths.json"
    keeper = scheduler_of(llm).monitor.policy._keeper
    monkeypatch.setattr(keeper, "_path", path)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = pat_vllm.report(llm).predictor.responses
    with monkeypatch.context() as disk:
        disk.setattr(files.os, "replace", full)
        outcomes = run(llm, long_tail(seed=4, ignore_eos=False))
        run(llm, long_tail(seed=5))  # the end of a batch is seen when the next comes
        assert not os.listdir(tmp_path)
    assert all(one.token_ids for one in outcomes.values())
    assert pat_vllm.report(llm).predictor.responses == before + 12
    assert keeper._failed == os.strerror(errno.ENOSPC)

"""The predictor policy decides in an engine of a mixture of experts, by a profile of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import pat_vllm
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.policy import SETTLE_SECONDS
from pat_vllm.profile import Profile, StepShape
from pat_vllm.profiling import cache as profile_cache
from pat_vllm.profiling import quality
from tests.engine.specs import POLICY
from tests.support.engines import Job, run, scheduler_of
from tests.support.same import assert_teacher_forced

pytestmark = pytest.mark.engine(POLICY)

REPLICAS, GROUP = Layout(1, 2), Layout(2, 1)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv(profile_cache.CACHE_DIR, str(path))
        # Kept however noisy this machine is: the tests look at what was kept.
        patch.setattr(quality, "MOST_UNSETTLED", 1.0)
        patch.setattr(quality, "MOST_LEFT_OUT", 1.0)
        yield path


@pytest.fixture
def deciding(llm: Any) -> Any:
    """The engine when a batch is over: the layout that the test's set-up asked for is let go."""
    run(llm, {"first": Job([5, 7], {"max_tokens": 2, "ignore_eos": True})})
    pat_vllm.report(llm)  # which ends the batch
    return llm


@pytest.fixture
def profile(deciding: Any, cache: Path) -> Profile:
    """The one that the engine measured when it started."""
    (path,) = cache.rglob("*.json")
    return Profile.load(path)


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


def biased(profile: Profile, batch: int = 6) -> Profile:
    """Says that `GROUP` is by far the fastest layout below `batch` requests, else `REPLICAS`.

    Steps take a hundred times as long as they were measured, so that no switch is too dear.
    """

    def factor(layout: Layout, requests: int) -> float:
        if layout == REPLICAS or not requests:
            return 100.0
        return 2.0 if requests < batch else 5000.0

    steps = tuple(
        sample.model_copy(
            update={
                name: getattr(sample, name) * factor(sample.layout, sample.batch)
                for name in ("seconds", "low", "high")
            }
        )
        for sample in profile.steps
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


def test_it_profiles_plans_and_reports(deciding: Any, profile: Profile) -> None:
    layouts = (REPLICAS, GROUP)
    assert profile.kind == "measured" and profile.experts == (8, 2)
    assert profile.layouts == tuple(pat_vllm.report(deciding).layouts) == layouts
    assert {sample.layout for sample in profile.steps} == {*layouts}
    assert {(switch.source, switch.target) for switch in profile.switches} == {
        *permutations(layouts, 2)
    }

    jobs = long_tail()
    outcomes = run(deciding, jobs, before_step=settle)
    assert {name: len(outcome.token_ids) for name, outcome in outcomes.items()} == {
        name: job.sampling["max_tokens"] for name, job in jobs.items()
    }
    whole = pat_vllm.report(deciding)
    report = whole.predictor
    assert report.plans > 0 and 0 < report.slowest_plan <= report.planning
    # Which layout is the faster one for so small a model is the machine's affair.
    # How many steps are compared with their predictions, too: that is bounded by the time it takes.
    assert sum(count for count, _ in report.step_error.values()) > 0
    batch, tokens = whole.batches[-1], sum(len(o.token_ids) for o in outcomes.values())
    assert (batch.responses, batch.tokens, batch.control) == (len(jobs), tokens, False)
    assert batch.seconds > 0
    assert [*whole.steps[REPLICAS].by_draft_length] == [0], "it has no drafts"


def test_its_switches_are_those_of_its_decisions_and_keep_the_outputs(
    deciding: Any, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a profile by which one group is slow for many requests and fast for few."""
    llm, scheduler = deciding, scheduler_of(deciding)
    policy = Believing(biased(profile))
    monkeypatch.setattr(scheduler.monitor, "policy", policy)
    # Or it would go by rates measured at start, and may find recomputing these contexts cheaper.
    monkeypatch.setattr(scheduler.controller.costs, "mode", "migrate")
    # Where it begins is up to what it learnt in the batch before: in a group, if that was noisy,
    # which it need not leave where a line through the profile's steps stands for them.
    assert pat_vllm.switch(llm, tp=1)
    scheduler.controller._forced = False
    jobs = long_tail(seed=1)
    outcomes = run(llm, jobs, before_step=settle)
    report = pat_vllm.report(llm)
    fired = [decision for decision in report.predictor.decisions if decision.fired]
    switches = [switch for switch in report.switches if switch.reason == "policy"][-len(fired) :]
    assert [(switch.source, switch.target) for switch in switches] == [
        (decision.layout, decision.target) for decision in fired
    ]
    assert all(decision.real_cost is not None for decision in fired)
    # The few are for the group.
    assert fired and switches[-1].target == GROUP
    assert switches[-1].migrated > 0 and switches[-1].tokens > 0

    monkeypatch.setattr(scheduler.monitor, "policy", Believing(biased(profile)))
    pat_vllm.switch(llm, tp=1)
    static = run(llm, jobs)
    for name, outcome in outcomes.items():
        assert outcome.token_ids == static[name].token_ids
    pat_vllm.switch(llm, tp=1)
    assert_teacher_forced(llm, jobs, outcomes)


def test_fixed_lengths_are_known_and_not_learnt_from(deciding: Any) -> None:
    """`ignore_eos` says how long a response will be, and nothing about others."""
    llm, monitor = deciding, scheduler_of(deciding).monitor
    before = pat_vllm.report(llm).predictor
    seen, jobs = [], long_tail(seed=2)
    # Steps of a replica are counted from a switch.
    assert pat_vllm.switch(llm, tp=2) and pat_vllm.switch(llm, tp=1)

    def look(step: int) -> None:
        if step == 3:
            seen.append(monitor.requests.arrays())

    run(llm, jobs, before_step=look)
    (live,) = seen
    assert len(live) == 12 and live.exact.all()
    assert set(live.max_tokens) == {job.sampling["max_tokens"] for job in jobs.values()}
    assert (live.num_output_tokens <= live.max_tokens).all()
    assert (live.num_computed_tokens <= live.context).all()
    assert len({*live.number}) == 12 and live.replica_steps.max() in (1, 2, 3)
    assert pat_vllm.report(llm).predictor.responses == before.responses

    run(llm, long_tail(seed=3, ignore_eos=False))
    report = pat_vllm.report(llm).predictor
    assert report.responses == before.responses + 12 and report.batches == before.batches + 1


def test_a_batch_goes_on_while_tools_run(deciding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trajectories of three turns in lockstep: the engine has no request between two of them."""
    llm, controller = deciding, scheduler_of(deciding).controller
    batch_over = Mock(wraps=scheduler_of(llm).monitor.policy.batch_over)
    monkeypatch.setattr(scheduler_of(llm).monitor.policy, "batch_over", batch_over)
    monkeypatch.setattr(controller, "_idle_seconds", 1e6)  # however long this machine pauses
    sampling = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}

    def turn(held: dict[str, list[int]]) -> dict[str, list[int]]:
        """What each trajectory holds after its next turn, and what a tool appends."""
        given = run(llm, {name: Job(tokens, sampling) for name, tokens in held.items()})
        pat_vllm.report(llm)
        return {f"{name}+": [*held[name], *given[name].token_ids, 9, 8, 7] for name in held}

    for batch in range(2):
        held = {f"{batch}-{i}": [5 + batch, 6 + i, *range(10, 50)] for i in range(16)}
        for _ in range(3):
            held = turn(held)
            assert batch_over.call_count == batch
        llm.reset_prefix_cache()  # as where training begins
        assert batch_over.call_count == batch + 1
    turn(held)
    assert batch_over.call_count == 2
    monkeypatch.setattr(controller, "_idle_seconds", 0.0)
    pat_vllm.report(llm)
    assert batch_over.call_count == 3, "nothing came for as long as that"

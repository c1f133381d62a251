"""The predictor policy in the simulator: what it gains, and what wrong predictions cost it."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from unittest.mock import Mock

import pytest

from benchmarks.simulator import shapes
from benchmarks.simulator.engine import SimulatedReport
from benchmarks.simulator.ground_truth import GroundTruth, ReplayedGroundTruth
from benchmarks.simulator.simulate import simulate, simulate_batches
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import (
    _HYSTERESIS,
    _PATIENCE,
    _PLANNING_SHARE,
    _URGENT_SHARE,
    AdaptivePolicy,
)
from pat_vllm.predictor.cost import CostModel
from pat_vllm.predictor.policy import Policy, StayPolicy
from pat_vllm.predictor.state import LiveRequests, LiveState
from pat_vllm.profile import StepShape
from pat_vllm.reporting import SwitchReport
from tests.support.clairvoyant import clairvoyant
from tests.support.truths import DriftingTruth, ScaledSwitches
from tests.unit.predictor.examples import (
    BOUND,
    GROUP,
    REPLICAS,
    WORKLOADS,
    batches,
    live_requests,
    policy_of,
    switch_report,
    two_ranks,
)

PROFILE = two_ranks()
TRUTH = ReplayedGroundTruth(PROFILE)


def run(
    policy: Policy, traces: list[LengthTrace], truth: GroundTruth = TRUTH
) -> list[SimulatedReport]:
    return simulate_batches(traces, policy, truth, PROFILE)


def seconds(runs: list[SimulatedReport]) -> float:
    """Mean seconds of a batch."""
    return fmean(run.generation_seconds for run in runs)


def best_static(traces: list[LengthTrace], truth: GroundTruth = TRUTH) -> float:
    """Mean seconds of a batch in the better static layout."""
    return min(seconds(run(StayPolicy(layout), traces, truth)) for layout in PROFILE.layouts)


@functools.cache
def static(name: str) -> float:
    return best_static(batches(name))


@functools.cache
def adaptive(name: str) -> list[SimulatedReport]:
    """A new engine's first batches."""
    return run(policy_of(PROFILE), batches(name))


@pytest.mark.parametrize("name", WORKLOADS)
def test_within_three_percent_of_the_clairvoyant_and_never_worse_than_static(name: str) -> None:
    """The first batch, of whose lengths nothing is known, included and left out."""
    ours = adaptive(name)
    best = [clairvoyant(trace, PROFILE.layouts, TRUTH, PROFILE) for trace in batches(name)]
    assert seconds(ours) < 1.03 * seconds(best)
    assert seconds(ours[1:]) < 1.03 * seconds(best[1:])
    assert seconds(ours) < 1.02 * static(name)
    if name in ("long tail", "two modes", "straggler"):
        assert seconds(ours) < 0.92 * static(name)
        assert all(batch.switches_on_the_way for batch in ours)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("long tail", {tp: factor}) for tp in (1, 2) for factor in (2, 0.5)),
        *(("two modes", {1: factor, 2: factor}) for factor in (2, 0.5)),
        *(("short", {tp: 0.5}) for tp in (1, 2)),
        ("long", {1: 2}),
        ("straggler", {2: 2}),
    ],
)
def test_a_profile_that_is_wrong_by_two_costs_at_most_five_percent(
    name: str, wrong: dict[int, float]
) -> None:
    """Over the first batches of an engine, the very first included: relative to the right profile,
    and to the better static layout."""
    misled = seconds(run(policy_of(two_ranks(wrong)), batches(name)))
    assert misled < 1.05 * seconds(adaptive(name))
    assert misled < 1.05 * static(name)


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("short", ReplayedGroundTruth(PROFILE, PROFILE)),
        ("long tail", DriftingTruth(TRUTH, slowdown=1.0, over=60.0)),
        ("long tail", ScaledSwitches(TRUTH, 20.0)),
    ],
    ids=["noise", "drift", "dear switches"],
)
def test_a_machine_that_the_profile_does_not_describe(name: str, truth: GroundTruth) -> None:
    ours = seconds(run(policy_of(PROFILE), batches(name), truth))
    assert ours < 1.03 * best_static(batches(name), truth)


@pytest.mark.parametrize("gap", [0.1, 1.0])
def test_staggered_arrivals_do_not_make_it_thrash(gap: float) -> None:
    trace = shapes.uniform(40, 60, 120, BOUND, seed=1)
    trace = replace(trace, arrivals=tuple(gap * i for i in range(40)))
    (ours,) = run(policy_of(PROFILE), [trace])
    assert ours.generation_seconds < 1.03 * best_static([trace])
    stalls = sum(switch.seconds - switch.quiesce for switch in ours.switches_on_the_way)
    assert stalls < 0.035 * ours.generation_seconds


def test_a_burst_into_one_group_goes_back_to_replicas() -> None:
    tail = shapes.uniform(2, 380, 384, BOUND, seed=1)
    burst = shapes.uniform(100, 80, 120, BOUND, seed=2)
    trace = replace(
        burst,
        lengths=tail.lengths + burst.lengths,
        arrivals=(0.0,) * 2 + (3.0,) * 100,
        groups=tuple(range(102)),
        num_prompt_tokens=(20,) * 102,
    )
    policy = policy_of(PROFILE)
    run(policy, batches("long"))
    (ours,) = run(policy, [trace])
    targets = [(switch.num_seqs, switch.target) for switch in ours.switches_on_the_way]
    assert any(live > 90 and target == REPLICAS for live, target in targets), targets
    assert ours.timeline[0].num_seqs == 2
    assert next(sample.layout for sample in ours.timeline if sample.at - ours.began > 2.5) == GROUP


def test_a_batch_opens_where_one_like_the_last_begins_best() -> None:
    """An idle engine switches, so that no request waits for it."""
    few, many = (shapes.uniform(n, 370, BOUND, BOUND, seed=1) for n in (2, 100))
    runs = run(policy_of(PROFILE), [few, few, many, many])
    assert [batch.timeline[0].layout for batch in runs] == [REPLICAS, GROUP, GROUP, REPLICAS]
    assert not runs[1].switches


@pytest.mark.parametrize(("name", "best"), [("straggler", GROUP), ("long tail", REPLICAS)])
def test_control_batches_stay_in_the_best_static_layout(name: str, best: Layout) -> None:
    """From their first step on: the idle engine went there. Others begin in replicas."""
    policy, traces = policy_of(PROFILE, control_every=3), batches(name)
    static = {layout: seconds(run(StayPolicy(layout), traces)) for layout in PROFILE.layouts}
    assert min(static, key=static.__getitem__) == best
    runs = run(policy, traces * 2)
    for number, batch in enumerate(runs, 1):
        if number % 3 == 0:
            assert batch.timeline[0].layout == best and not batch.switches_on_the_way
        else:
            assert batch.timeline[0].layout == REPLICAS and batch.switches_on_the_way
    learnt = policy.report()
    assert learnt.responses == 2 * sum(len(trace) for trace in traces)


def test_a_report_of_decisions_and_what_is_kept(tmp_path: Path) -> None:
    """What was predicted and what became of it; what is learnt is kept for the next engine."""
    policy = policy_of(PROFILE, state_dir=tmp_path)
    runs = run(policy, batches("long tail"))
    report = policy.report()
    fired = [decision for decision in report.decisions if decision.fired]
    assert len(fired) == sum(len(batch.switches_on_the_way) for batch in runs)
    assert len(fired) < len(report.decisions), "nearly taken ones are noted, too"
    for decision in fired:
        assert decision.real_cost is not None and decision.real_cost >= 0
        assert decision.real_after is not None and decision.real_after > 0
        assert decision.why in ("plan", "probe")
    last = [decision for decision in fired if decision.why == "plan"][-1]
    assert last.switch_now < last.no_switch
    assert last.real_cost == pytest.approx(last.cost, rel=0.5, abs=0.02)
    assert report.share_come_true is not None and report.share_come_true > 0.5
    for count, error in report.step_error.values():
        assert count > 10 and error < 0.04
    assert report.batches == policy_of(PROFILE, state_dir=tmp_path).report().batches == 3


def test_it_plans_only_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of equal lengths changes once; contexts that grow are looked at now and then."""
    policy = policy_of(PROFILE)
    trace = shapes.uniform(64, 200, 200, BOUND, seed=0)
    choose = Mock(wraps=policy.choose)
    monkeypatch.setattr(policy, "choose", choose)
    simulate(trace, policy, TRUTH, PROFILE)
    assert choose.call_count > 300
    assert policy.report().plans < 60


def test_a_dear_plan_is_followed_sooner_by_another_where_half_of_the_requests_have_ended() -> None:
    """Plans keep to a share of the time; those due to that, to a larger one."""
    seconds = 0.004
    ticks = itertools.count()
    policy = AdaptivePolicy(PROFILE, bound=BOUND, timer=lambda: seconds * next(ticks))
    policy.arrived(0.0)
    for _ in range(_PATIENCE):
        policy.stepped(0.0, REPLICAS, StepShape(32, 320, 10, 320, 2), 0.05)

    def planned(now: float, live: int) -> bool:
        before = policy.report().plans
        requests = live_requests([10] * live)
        policy.choose(LiveState(now, REPLICAS, live, 60.0, lambda: requests))
        return policy.report().plans > before

    assert planned(10.0, 32)
    rest, short = seconds / _PLANNING_SHARE, seconds / _URGENT_SHARE
    assert not planned(10.0 + 0.99 * short, 16)
    assert not planned(10.0 + 1.01 * short, 17)
    assert planned(10.0 + 1.01 * short, 16)
    now = 10.0 + 1.01 * short
    assert not planned(now + 0.99 * rest, 9)
    assert planned(now + 1.01 * rest, 9)


def test_the_owner_of_the_cost_model_tells_it_of_switches() -> None:
    """The engine where the model is the engine's; the policy where it is its own."""
    reports = []

    class Costs(CostModel):
        def observe(self, report: SwitchReport) -> None:
            reports.append(report)

    costs = Costs()
    policy = policy_of(PROFILE, costs=costs)
    assert costs.seconds(REPLICAS, GROUP, 8, 800) > 0, "it has the profile"
    report = switch_report(REPLICAS, GROUP, seconds=1.0, num_seqs=8, migrated=8, tokens=800)
    policy.switched(report)
    assert reports == []
    own = policy_of(PROFILE)
    before = own._costs.seconds(REPLICAS, GROUP, 8, 800)
    own.switched(report)
    assert own._costs.seconds(REPLICAS, GROUP, 8, 800) > before


def test_a_switch_that_comes_too_soon_is_made_as_soon_as_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though nothing ends meanwhile, and the next review is far."""
    policy = policy_of(PROFILE, bound=8000)
    observed: list[LiveRequests] = []
    monkeypatch.setattr(policy._lengths, "observe_running", observed.append)
    policy.arrived(0.0)
    policy.switched(switch_report(GROUP, REPLICAS, seconds=1.0, num_seqs=4, migrated=4, tokens=400))
    for _ in range(20):
        policy.stepped(1.0, REPLICAS, StepShape(2, 200, 100, busy=2), 0.039)
    live = live_requests([100] * 4, max_tokens=8000, exact=True)

    def choice(now: float) -> Layout:
        return policy.choose(LiveState(now, REPLICAS, len(live), 100.0, lambda: live))

    soonest = 1.0 + _HYSTERESIS * 1.0
    assert [choice(now) for now in (1.1, 2.0, soonest - 0.1)] == [REPLICAS] * 3
    (decision,) = policy.report().decisions
    assert (decision.why, decision.target) == ("hysteresis", GROUP)
    assert choice(soonest) == GROUP
    assert observed and all(requests is live for requests in observed)


def test_a_batch_whose_requests_were_all_aborted_at_once_is_no_work() -> None:
    policy = policy_of(PROFILE)
    policy.arrived(1e6)
    policy.idle(1e6 + 1)
    assert policy._worked_before == 0.0

"""The predictor policy in the simulator: what it gains, and what wrong predictions cost it."""

from dataclasses import replace
from itertools import pairwise, permutations
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from benchmarks.paper.clairvoyant import clairvoyant
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import _DWELL, AdaptivePolicy
from pat_vllm.predictor.cost import CostModel
from pat_vllm.predictor.lengths import LengthModel
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.predictor.state import LiveRequests, LiveState
from pat_vllm.profiling.profile import Profile, StepSample, StepShape, SwitchSample
from pat_vllm.reporting import SwitchReport
from pat_vllm.simulator import traces
from pat_vllm.simulator.replay import simulate_batches
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.truth import DriftingTruth, ReplayedTruth, ScaledTruth

REPLICAS, GROUP = Layout(1, 2), Layout(2, 1)
BOUND = 384
BATCHES = 3
LAYOUTS = (REPLICAS, GROUP)


def step_seconds(tp, batch, context):
    """Reading weights, which a group divides, and work per request, which it does not."""
    return 0.004 + 0.030 / tp**0.9 + 0.0024 * batch + 1e-7 * context / tp


def make_profile(steps=None):
    """A profile of two ranks; `steps` scales its step times by tp."""
    samples = [
        StepSample(
            layout=Layout.of(tp, 2),
            batch=batch,
            context=batch * mean,
            longest=mean,
            busy=busy,
            seconds=(seconds := (steps or {}).get(tp, 1) * step_seconds(tp, batch, batch * mean)),
            low=0.85 * seconds,
            high=1.3 * seconds,
            repeats=5,
        )
        for tp in (1, 2)
        for busy in range(1, 3 - tp + 1)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        for mean in (64, 256)
    ]
    switches = [
        SwitchSample(
            source=source,
            target=target,
            num_seqs=live,
            tokens=100 * live,
            kv_bytes=live << 21,
            seconds=0.008 + 0.0006 * live,
            kv=0.0005 * live,
            weights=0.0,
        )
        for source, target in permutations(LAYOUTS)
        for live in (0, 1, 8, 32)
    ]
    return Profile(
        kind="modelled",
        title="two ranks",
        created="2026-01-01",
        key={},
        ranks=2,
        layouts=LAYOUTS,
        max_num_seqs={1: 128, 2: 256},
        max_batch_tokens={1: 8192, 2: 16384},
        kv_tokens={1: 10**6, 2: 2 * 10**6},
        kv_bytes_per_token=20_000,
        steps=tuple(samples),
        switches=tuple(switches),
    )


@pytest.fixture(scope="module")
def profile():
    return make_profile()


@pytest.fixture(scope="module")
def truth(profile):
    return ReplayedTruth(profile)


def long_tail(seed):
    """The paper's lengths, 64 times shorter."""
    trace = traces.deepscaler(128, 64 * BOUND, seed)
    lengths = tuple(max(1, round(length / 64)) for length in trace.lengths)
    return replace(trace, lengths=lengths, max_tokens=BOUND, num_prompt_tokens=(20,) * 128)


WORKLOADS = {
    "long tail": long_tail,
    "two modes": lambda seed: traces.two_mode(128, 24, 0.5, 0.04, BOUND, seed),
    "short": lambda seed: traces.uniform(128, 24, 48, BOUND, seed),
    "long": lambda seed: traces.uniform(24, 150, 200, BOUND, seed),
    "straggler": lambda seed: traces.straggler(32, 40, 320, BOUND, seed),
}


def batches(name):
    return [WORKLOADS[name](seed) for seed in range(BATCHES)]


def policy_of(profile, bound=BOUND, **options):
    return AdaptivePolicy(profile, bound=bound, timer=lambda: 0.0, **options)


def run(policy, truth, profile, name):
    return simulate_batches(batches(name), policy, truth, ReplicaCapacity.of(profile))


def seconds(runs):
    return [one.generation_seconds for one in runs]


@pytest.fixture(scope="module")
def static(profile, truth):
    """Mean seconds of a batch in the better static layout, by workload."""
    return {
        name: min(
            fmean(seconds(run(StayPolicy(layout), truth, profile, name)))
            for layout in profile.layouts
        )
        for name in WORKLOADS
    }


@pytest.fixture(scope="module")
def adaptive(profile, truth):
    """A new engine's first batches, by workload."""
    return {name: run(policy_of(profile), truth, profile, name) for name in WORKLOADS}


def test_a_long_tail_takes_less_than_in_any_static_layout(adaptive, static):
    for name in ("long tail", "two modes", "straggler"):
        assert fmean(seconds(adaptive[name])) < 0.92 * static[name], name
        assert all(one.switches_on_the_way for one in adaptive[name])


@pytest.mark.parametrize("name", WORKLOADS)
def test_within_three_percent_of_the_clairvoyant_and_never_worse_than_static(
    name, profile, truth, static, adaptive
):
    """The first batch, of whose lengths nothing is known, included and left out."""
    ours = seconds(adaptive[name])
    capacity = ReplicaCapacity.of(profile)
    best = [
        clairvoyant(trace, profile.layouts, truth, capacity).generation_seconds
        for trace in batches(name)
    ]
    assert fmean(ours) < 1.03 * fmean(best)
    assert fmean(ours[1:]) < 1.03 * fmean(best[1:])
    assert fmean(ours) < 1.02 * static[name]


@pytest.mark.parametrize(
    "wrong", [{1: 2}, {1: 0.5}, {2: 2}, {2: 0.5}, {1: 2, 2: 2}, {1: 0.5, 2: 0.5}]
)
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_profile_that_is_wrong_by_two_costs_at_most_five_percent(
    name, wrong, profile, truth, static, adaptive
):
    """Over the first batches of an engine, the very first included: relative to the right profile,
    and to the better static layout."""
    mutated = fmean(seconds(run(policy_of(make_profile(steps=wrong)), truth, profile, name)))
    assert mutated < 1.05 * fmean(seconds(adaptive[name]))
    assert mutated < 1.05 * static[name]


@pytest.mark.parametrize("name", ["long tail", "short"])
def test_a_machine_that_drifts_or_is_noisy(name, profile, truth, static):
    noisy = ReplayedTruth(profile, profile)
    drifting = DriftingTruth(truth, slowdown=1.0, over=60.0)
    for real in (noisy, drifting):
        ours = fmean(seconds(run(policy_of(profile), real, profile, name)))
        best = min(
            fmean(seconds(run(StayPolicy(layout), real, profile, name)))
            for layout in profile.layouts
        )
        assert ours < 1.03 * best


def test_switches_that_cost_more_than_the_profile_says_are_noticed(profile, truth, static):
    dear = ScaledTruth(truth, switches=20.0)
    ours = seconds(run(policy_of(profile), dear, profile, "long tail"))
    best = min(
        fmean(seconds(run(StayPolicy(layout), dear, profile, "long tail")))
        for layout in profile.layouts
    )
    assert fmean(ours) < 1.03 * best


def staggered(gap, count=40):
    trace = traces.uniform(count, 60, 120, BOUND, seed=1)
    return replace(trace, arrivals=tuple(gap * i for i in range(count)))


@pytest.mark.parametrize("gap", [0.1, 0.3, 1.0, 3.0])
def test_staggered_arrivals_do_not_make_it_thrash(gap, profile, truth):
    trace = staggered(gap)
    capacity = ReplicaCapacity.of(profile)
    (ours,) = simulate_batches([trace], policy_of(profile), truth, capacity)
    best = min(
        simulate_batches([trace], StayPolicy(layout), truth, capacity)[0].generation_seconds
        for layout in profile.layouts
    )
    assert ours.generation_seconds < 1.03 * best
    assert sum(s.seconds - s.quiesce for s in ours.switches_on_the_way) < (
        0.035 * ours.generation_seconds
    )


def test_a_burst_into_one_group_goes_back_to_replicas(profile, truth):
    tail = traces.uniform(2, 380, 384, BOUND, seed=1)
    burst = traces.uniform(100, 80, 120, BOUND, seed=2)
    trace = replace(
        burst,
        lengths=tail.lengths + burst.lengths,
        arrivals=(0.0,) * 2 + (3.0,) * 100,
        groups=tuple(range(102)),
        num_prompt_tokens=(20,) * 102,
    )
    policy = policy_of(profile)
    simulate_batches(batches("long"), policy, truth, ReplicaCapacity.of(profile))
    (ours,) = simulate_batches([trace], policy, truth, ReplicaCapacity.of(profile))
    targets = [(switch.num_seqs, switch.target) for switch in ours.switches_on_the_way]
    assert any(live > 90 and target == REPLICAS for live, target in targets), targets
    assert ours.timeline[0].num_seqs == 2
    assert next(one.layout for one in ours.timeline if one.at - ours.began > 2.5) == GROUP


def test_few_long_requests_end_in_one_group(profile, truth):
    traces_ = [traces.uniform(2, 300, 384, BOUND, seed) for seed in range(3)]
    policy = policy_of(profile)
    runs = simulate_batches(traces_, policy, truth, ReplicaCapacity.of(profile))
    for one in runs:
        first, *probe = one.switches_on_the_way
        assert first.target == GROUP and first.at - one.began < 0.1 * one.generation_seconds
        assert not probe or (one is runs[0] and probe[-1].target == GROUP)


def test_decisions_tell_what_was_predicted_and_what_became_of_it(profile, truth):
    policy = policy_of(profile)
    runs = run(policy, truth, profile, "long tail")
    fired = [one for one in policy.report().decisions if one.fired]
    assert len(fired) == sum(len(one.switches_on_the_way) for one in runs)
    for one in fired:
        assert one.real_cost is not None and one.real_cost >= 0
        assert one.real_after is not None and one.real_after > 0
        assert one.why in ("saving", "probe")
    last = [one for one in fired if one.why == "saving"][-1]
    assert last.saving > 0
    assert last.real_cost == pytest.approx(last.cost, rel=0.5, abs=0.02)
    assert any(not one.fired for one in policy.report().decisions), (
        "nearly taken ones are noted, too"
    )
    report = policy.report()
    assert report.batches == BATCHES
    for count, error in report.step_error.values():
        assert count > 10 and error < 0.04


def test_it_plans_only_when_something_has_changed(profile, truth):
    """A batch of equal lengths changes once; contexts that grow are looked at now and then."""
    policy = policy_of(profile)
    trace = traces.uniform(64, 200, 200, BOUND, seed=0)
    (run_,) = simulate_batches([trace], policy, truth, ReplicaCapacity.of(profile), chunk=1)
    steps = sum(one.steps for one in run_.steps.values())
    assert steps > 300
    assert policy.report().plans < 60


def test_lengths_are_kept_in_a_file(tmp_path, profile, truth):
    path = tmp_path / "lengths.json"
    run(policy_of(profile, lengths_file=path), truth, profile, "long tail")
    again = policy_of(profile, lengths_file=path)
    assert again.report().batches == BATCHES
    path.write_text("{")
    with pytest.raises(ValueError, match=r"lengths\.json"):
        policy_of(profile, lengths_file=path)


def test_a_file_of_lengths_that_cannot_be_written_is_told_once(tmp_path, profile, truth, caplog):
    path = tmp_path / "gone" / "lengths.json"
    policy = policy_of(profile, lengths_file=path)
    run(policy, truth, profile, "long tail")
    assert policy.report().batches == BATCHES
    (told,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    for part in ("pat.policy.lengths_file", str(path), "No such file"):
        assert part in told


def test_a_report_only_reads(profile, monkeypatch):
    """It may be asked for from another thread, while the engine's is estimating."""
    policy = policy_of(profile)
    policy.finished(0.0, 1, 50, True)

    def estimate(self):
        raise AssertionError("a report estimates")

    monkeypatch.setattr(LengthModel, "_refresh", estimate)
    assert policy.report().responses == 1


def test_an_engines_cost_model_is_told_of_switches_by_the_engine(profile):
    """And by the policy where it is the policy's own, as in a simulation."""
    told = []

    class Costs(CostModel):
        def observe(self, report):
            told.append(report)

    costs = Costs()
    policy = policy_of(profile, costs=costs)
    source, target = profile.layouts
    assert costs.seconds(source, target, 8, 800) > 0, "it has the profile"
    values: dict[str, Any] = dict.fromkeys(SwitchReport.__dataclass_fields__, 0.0)
    values |= {"source": source, "target": target, "reason": "policy", "seconds": 1.0}
    report = SwitchReport(**values | {"num_seqs": 8, "migrated": 8, "tokens": 800})
    policy.switched(report)
    assert told == []
    own = policy_of(profile)
    before = own._costs.seconds(source, target, 8, 800)
    own.switched(report)
    assert own._costs.seconds(source, target, 8, 800) > before


def test_a_switch_that_comes_too_soon_is_made_as_soon_as_it_may(profile):
    """Though nothing ends meanwhile, and the next review is far."""
    policy = policy_of(profile, bound=8000)
    values: dict[str, Any] = dict.fromkeys(SwitchReport.__dataclass_fields__, 0.0)
    values |= {"source": GROUP, "target": REPLICAS, "reason": "policy", "seconds": 1.0}
    policy.arrived(0.0, 1)
    policy.switched(SwitchReport(**values | {"num_seqs": 4, "migrated": 4, "tokens": 400}))
    for _ in range(20):
        policy.stepped(1.0, REPLICAS, StepShape(2, 200, 100, busy=2), 0.039)
    count = np.full(4, 100)
    live = LiveRequests(count, 0 * count, 80 * count, count > 0, count, count % 2, count)

    def choice(now):
        return policy.choose(LiveState(now, REPLICAS, len(live), 100.0, lambda: live))

    soonest = 1.0 + _DWELL * 1.0
    assert [choice(now) for now in (1.1, 2.0, soonest - 0.1)] == [REPLICAS] * 3
    (decision,) = policy.report().decisions
    assert (decision.why, decision.target) == ("hysteresis", GROUP)
    assert choice(soonest) == GROUP


def test_a_refusal_leaves_the_back_off_to_the_engine(profile, truth):
    """Asked again, the policy asks for the same switch again."""
    wanted = []

    class Refusing(AdaptivePolicy):
        def choose(self, state):
            target = super().choose(state)
            if target == state.layout:
                return target
            wanted.append((state.now, target))
            self.refused(state.now)
            return state.layout

    policy = Refusing(profile, bound=BOUND, timer=lambda: 0.0)
    runs = run(policy, truth, profile, "long tail")
    assert not [s for one in runs for s in one.switches if s.reason == "policy"]
    gaps = [after - before for (before, _), (after, _) in pairwise(wanted)]
    assert min(gaps) < 0.5

"""Layouts that differ in how experts lie alone, with made-up profiles of a mixture of experts."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.predictor import cost, step_time
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.cost import CarryRates, CostModel
from pat_vllm.predictor.planner import Planner, course
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.predictor.state import LiveRequests
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profiling import profile as profiles
from pat_vllm.profiling.plan import ProfilePlan
from pat_vllm.profiling.points import EngineLimits, StepPoint, SwitchPoint
from pat_vllm.profiling.profile import Profile, ProfileError, StepSample, StepShape, SwitchSample
from pat_vllm.reporting import SwitchReport
from pat_vllm.routing import Placed, spread
from pat_vllm.scheduler.make_policy import make_policy
from pat_vllm.simulator import traces
from pat_vllm.simulator.modelled.hardware import measured_noise
from pat_vllm.simulator.replay import simulate, simulate_batches
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.truth import ReplayedTruth
from tests.support.mutation import mutated
from tests.support.schedules import FollowSchedule, LayoutSchedule

LAYOUTS = ONE, CUT, SPREAD = Layout(1, 2), Layout(2, 1), Layout(2, 1, "ep")
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SIZES = {1: 64, 2: 128}


def step_seconds(layout, batch):
    """One request is served fastest by cut experts, some by spread ones, many by replicas."""
    if layout == ONE:
        return 0.015 + 0.0004 * batch
    return 0.008 + 0.001 * batch if layout == CUT else 0.0105 + 0.0005 * batch


def a_profile(seconds=step_seconds, layouts=LAYOUTS, switch_seconds=1e-4):
    """A profile of steps without noise; contexts cost nothing."""
    steps = tuple(
        StepSample.of(layout, StepShape(batch, batch * each, each, busy=busy), [time] * 3)
        for layout in layouts
        for busy in {1, layout.replicas}
        for batch in BATCHES
        for each in (64, 512)
        for time in [seconds(layout, batch)]
    )
    switches = tuple(
        SwitchSample(
            source=source,
            target=target,
            num_seqs=live,
            tokens=100 * live,
            kv_bytes=0,
            seconds=switch_seconds,
            kv=0.0,
            weights=0.0,
        )
        for source, target in itertools.permutations(layouts, 2)
        for live in (0, 8)
    )
    sizes = [layout.tp for layout in layouts]
    return Profile(
        kind="modelled",
        title="a made-up mixture of experts",
        created="2026-01-01",
        key={"layouts": [str(layout) for layout in layouts]},
        ranks=layouts[0].world_size,
        layouts=layouts,
        max_num_seqs={tp: 64 * tp for tp in sizes},
        max_batch_tokens={tp: 8192 * tp for tp in sizes},
        kv_tokens={tp: 10**6 * tp for tp in sizes},
        kv_bytes_per_token=1000,
        steps=steps,
        switches=switches,
    )


@pytest.fixture(scope="module")
def profile():
    return a_profile()


# ---------------------------------------------------------------- files


def test_files_keep_the_kinds(profile, tmp_path):
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    content = json.loads(path.read_text())
    assert content["format"] == 2
    assert content["layouts"] == ["tp1dp2", "tp2dp1", "tp2dp1ep"]
    assert {step["layout"] for step in content["steps"]} == {*content["layouts"]}
    assert content["switches"][-1]["source"] == "tp2dp1ep"


def in_format_1(profile):
    """What a file held before layouts had names; of a profile without kinds."""
    content = profile.model_dump(mode="json") | {"format": 1}

    def tp(name):
        return Layout.parse(name).tp

    content["layouts"] = [*map(tp, content["layouts"])]
    content["key"] = {"layouts": content["layouts"]}
    for one in content["steps"]:
        one["tp"] = tp(one.pop("layout"))
    for one in content["switches"]:
        one |= {"source": tp(one["source"]), "target": tp(one["target"])}
    return content


def write(path, content):
    path.write_text(json.dumps({"digest": profiles._digest(content), **content}))


def test_files_of_format_1_are_read(tmp_path):
    dense = a_profile(layouts=(ONE, CUT))
    path = tmp_path / "profile.json"
    content = in_format_1(dense)
    write(path, content)
    found = Profile.load(path)
    assert found == dense
    found.check({"layouts": ["tp1dp2", "tp2dp1"]}, path)
    one, other = StepTimeModel.fit(found), StepTimeModel.fit(dense)
    batch = np.arange(1.0, 100.0)
    for layout in dense.layouts:
        seconds = one.seconds(layout, batch, 100 * batch, 100)
        assert np.array_equal(seconds, other.seconds(layout, batch, 100 * batch, 100))

    path.write_text(path.read_text().replace('"tp": 2', '"tp": 1', 1))
    with pytest.raises(ProfileError, match="digest does not match"):
        Profile.load(path)
    changes: list[dict[str, Any]] = [
        {"layouts": [1, 3]},
        {"ranks": "two"},
        {"steps": [{}]},
        {"steps": 7},
    ]
    for change in changes:
        write(path, content | change)
        with pytest.raises(ProfileError, match=r"of format 1.*make it again"):
            Profile.load(path)
    write(path, content | {"format": 3})
    with pytest.raises(ProfileError, match="has format 3, this version reads 1 and 2"):
        Profile.load(path)


@pytest.mark.parametrize(
    "path",
    [
        "pat_vllm/simulator/modelled/measured.json",
        "benchmarks/results/2026-11-23-advice/profile.json",
    ],
)
def test_files_of_this_repository_are_read(path, tmp_path):
    path = Path(__file__).parents[1] / path
    profile = Profile.load(path)
    assert profile.layouts == (ONE, CUT)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layouts": ["tp2dp1", "tp1dp2", "tp2dp1ep"]}, "ascend"),
        ({"layouts": ["tp1dp2", "tp2dp1", "tp2dp1", "tp2dp1ep"]}, "without repeats"),
        ({"layouts": ["tp1dp2", "tp2dp1"]}, "tp2dp1ep, which is not among layouts"),
        ({"layouts": ["tp1dp2", "tp2dp1", "tp2dp1ep", "tp4dp1"]}, "not one of 2 ranks"),
        ({"layouts": ["tp1dp2", "two"]}, "expected the name of a layout"),
        ({"steps": 0}, "no decode step of layout tp2dp1ep"),
    ],
)
def test_profiles_that_contradict_themselves(profile, changes, message):
    content = profile.model_dump(mode="json") | changes
    if changes == {"steps": 0}:
        named = profile.model_dump(mode="json")["steps"]
        content["steps"] = [step for step in named if step["layout"] != "tp2dp1ep"]
    with pytest.raises(ValueError, match=message):
        Profile.model_validate(content)


# ---------------------------------------------------------------- what is measured


def test_plans_measure_both_kinds():
    limits = EngineLimits(LAYOUTS, SIZES, {1: 512, 2: 1024}, 4096, 16, {1: 2000, 2: 4000})
    for plan in (ProfilePlan.quick(limits), ProfilePlan.full(limits)):
        points = [point for point in plan.points if isinstance(point, StepPoint)]
        of = {
            layout: [replace(point, layout=CUT) for point in points if point.layout == layout]
            for layout in LAYOUTS
        }
        assert of[CUT] == of[SPREAD] and of[ONE]
        first = {point.layout for point in points[: plan.essential]}
        assert first == {*LAYOUTS}
        pairs = {(p.source, p.target) for p in plan.points if isinstance(p, SwitchPoint)}
        assert pairs == {*itertools.permutations(LAYOUTS, 2)}


# ---------------------------------------------------------------- what is predicted


def check_steps():
    """Each kind has a residual of its own, which the linear base cannot tell from the other's."""

    def bent(layout, batch):
        sign = {ONE: 0, CUT: 1, SPREAD: -1}[layout]
        return (0.01 + 0.0005 * batch) * (1 + 0.3 * sign * (4 <= batch <= 16))

    profile = a_profile(bent)
    model = StepTimeModel.fit(profile)
    for sample in profile.steps:
        assert model.step(sample.layout, sample.shape) == pytest.approx(sample.seconds, rel=0.05)


def test_steps_of_each_kind_are_predicted():
    check_steps()


def test_features_without_the_kind_are_noticed():
    wrong = {'layout.experts == "ep"': "0"}
    with mutated(step_time._features, wrong), pytest.raises(AssertionError):
        check_steps()


def test_a_kind_that_is_slower_than_its_profile_does_not_spoil_the_other(profile):
    model = StepTimeModel.fit(profile)
    shape = StepShape(8, 800, 100)
    usual = {layout: model.step(layout, shape) for layout in LAYOUTS}
    for _ in range(40):
        for layout, factor in ((ONE, 1.0), (CUT, 1.0), (SPREAD, 2.0)):
            model.observe(layout, shape, factor * usual[layout])
    for layout, factor in ((ONE, 1.0), (CUT, 1.0), (SPREAD, 2.0)):
        assert model.step(layout, shape) == pytest.approx(factor * usual[layout], rel=0.1)


def a_report(source, target, seconds):
    return SwitchReport(
        at=0.0,
        source=source,
        target=target,
        reason="policy",
        num_seqs=4,
        migrated=4,
        recomputed=0,
        kv_bytes=0,
        seconds=seconds,
        quiesce=0.0,
        plan=0.0,
        states=0.0,
        kv=0.0,
        weights=0.0,
        activate=0.0,
        rpc=0.0,
        finish=0.0,
        tokens=400,
    )


def check_kv_stays():
    """KV costs nothing where no switch between the kinds was measured."""
    rates = CarryRates(1e-3, dict.fromkeys(LAYOUTS, 1e-6))
    model = CostModel("auto", rates)
    assert model.choose(100, CUT, SPREAD, 4) == "migrate"
    assert model.choose(100, ONE, SPREAD, 4) == "recompute"
    assert model.seconds(SPREAD, CUT, 4, 10**6) == 0.0 < model.seconds(ONE, CUT, 4, 10**6)

    dense = a_profile(layouts=(ONE, CUT), switch_seconds=0.5)
    model.fit(dense)
    assert model.seconds(CUT, SPREAD, 4, 400) == model.seconds(CUT, SPREAD, 4, 10**9)
    for mode in ("migrate", "recompute"):
        model.mode = mode
        assert model.choose(100, CUT, SPREAD, 4) == "migrate"
        assert model.choose(100, ONE, SPREAD, 4) == mode
        assert model.seconds(CUT, SPREAD, 4, 400) == model.seconds(CUT, SPREAD, 4, 10**9)
    model.mode = "auto"
    # Each kind has its own switches.
    model.fit(a_profile(switch_seconds=0.5))
    model.observe(a_report(ONE, SPREAD, seconds=1.0))
    assert model.seconds(ONE, SPREAD, 4, 400) == pytest.approx(1.0)
    assert model.seconds(ONE, CUT, 4, 400) == pytest.approx(0.5)

    placed = [Placed(f"r{i}", 0, 100 * i) for i in range(3)]
    wide, spread_wide = Layout(2, 2), Layout(2, 2, "ep")
    for ends in ((wide, spread_wide), (spread_wide, wide)):
        assert spread(placed, *ends) == {"r0": 0, "r1": 0, "r2": 0}
    assert {*spread(placed, Layout(1, 4), spread_wide).values()} == {0, 1}


def test_kv_stays_between_kinds():
    check_kv_stays()


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (spread, {"source.tp == target.tp": "False"}),
        (spread, {"source.tp == target.tp": "True"}),
        (CostModel._linear, {"source.tp == target.tp": "False"}),
        (CostModel._linear, {"source.tp == target.tp": "True"}),
        (CostModel._mode_of, {"source.tp == target.tp": "False"}),
        (CostModel._mode_of, {"source.tp == target.tp": "True"}),
        (CostModel.observe, {"report.source, report.target": "report.source, LAYOUT"}),
    ],
)
def test_kv_that_moves_is_noticed(monkeypatch, function, changes):
    monkeypatch.setattr(cost, "LAYOUT", CUT, raising=False)
    with mutated(function, changes), pytest.raises((AssertionError, IndexError)):
        check_kv_stays()


# ---------------------------------------------------------------- what is planned


def live_requests(count):
    zeros = np.zeros(count, np.int64)
    return LiveRequests(
        num_prompt_tokens=zeros + 100,
        num_output_tokens=zeros,
        max_tokens=zeros + 1000,
        exact=zeros > 0,
        group=np.arange(count),
        replica=zeros,
        num_computed_tokens=zeros + 100,
    )


def planner_of(profile, switch=lambda source, target, live, tokens: 0.0):
    return Planner(
        profile.layouts,
        StepTimeModel.fit(profile).seconds,
        switch,
        max_num_seqs=profile.max_num_seqs,
        kv_tokens=profile.kv_tokens,
    )


def best_at(planner, live, start):
    ahead = course(live_requests(live), np.full((live, 4), 200))
    return planner.outlook(ahead).plan(start).best


def test_the_planner_takes_the_faster_kind_at_each_number_of_requests(profile):
    planner = planner_of(profile)
    for live in range(1, 65):
        times = {one: step_seconds(one, max(1, live / one.replicas)) for one in LAYOUTS}
        (best,) = {best_at(planner, live, start) for start in LAYOUTS}
        assert times[best] <= 1.02 * min(times.values()), live
    for live, fastest in ((1, CUT), (3, CUT), (8, SPREAD), (12, SPREAD), (24, ONE), (64, ONE)):
        assert best_at(planner, live, CUT) == fastest


terms = st.tuples(st.floats(0.005, 0.02), st.floats(1e-4, 2e-3))


@settings(deadline=None, max_examples=25)
@given(st.fixed_dictionaries(dict.fromkeys(LAYOUTS, terms)), st.integers(1, 60))
def test_the_planner_takes_the_faster_kind_whatever_the_times(table, live):
    def seconds(layout, batch):
        fixed, each = table[layout]
        return fixed + each * batch

    planner = planner_of(a_profile(seconds))
    times = {layout: seconds(layout, max(1, live / layout.replicas)) for layout in LAYOUTS}
    for start in LAYOUTS:
        # Predictions are within some percent of the profile; half steps are waited for in replicas.
        assert times[best_at(planner, live, start)] <= 1.1 * min(times.values())


# ---------------------------------------------------------------- what is simulated


def test_switches_between_kinds_are_replayed(profile):
    trace = traces.uniform(24, 10, 200, 200, seed=0)
    schedule = LayoutSchedule(ONE, ((6, SPREAD), (12, CUT), (18, SPREAD)))
    truth, capacity = ReplayedTruth(profile), ReplicaCapacity.of(profile)
    run = simulate(trace, FollowSchedule(schedule), truth, capacity)
    ends = [(switch.source, switch.target) for switch in run.switches]
    assert ends == [(ONE, SPREAD), (SPREAD, CUT), (CUT, SPREAD), (SPREAD, ONE)]
    assert run.tokens == sum(trace.lengths)
    assert run.prefilled == sum(trace.num_prompt_tokens), "no KV is lost"
    assert {*run.steps} == {*LAYOUTS}
    for switch in run.switches_on_the_way:
        assert switch.migrated == switch.num_seqs and not switch.recomputed
        assert (switch.kv_bytes == 0) == (switch.source.tp == switch.target.tp)
        assert switch.seconds - switch.quiesce == pytest.approx(1e-4, rel=0.01)
    for layout, made in run.steps.items():
        mean = made.seconds / made.steps
        assert step_seconds(layout, 1) <= mean <= step_seconds(layout, 24)
    # Noise of another engine, which has no mixture, is that of the nearest layout.
    noisy = ReplayedTruth(profile, measured_noise())
    assert simulate(trace, FollowSchedule(schedule), noisy, capacity).seconds != run.seconds


def test_pat_uses_both_kinds_and_gains_by_it(profile):
    truth, capacity = ReplayedTruth(profile), ReplicaCapacity.of(profile)
    batches = [traces.lognormal(64, 300, 1.0, 3000, seed) for seed in range(3)]
    policy = AdaptivePolicy(profile, bound=3000, timer=lambda: 0.0)
    runs = simulate_batches(batches, policy, truth, capacity)
    assert {one.target for run in runs[1:] for one in run.switches} == {*LAYOUTS}
    ours = sum(run.seconds for run in runs)
    for kinds in ((ONE, CUT), (ONE, SPREAD)):
        fewer = AdaptivePolicy(a_profile(layouts=kinds), bound=3000, timer=lambda: 0.0)
        assert ours < sum(run.seconds for run in simulate_batches(batches, fewer, truth, capacity))
    for layout in LAYOUTS:
        static = simulate_batches(batches, StayPolicy(layout), truth, capacity)
        assert ours < sum(run.seconds for run in static)


# ---------------------------------------------------------------- what users name


def test_layouts_are_found_by_name_or_tp():
    for layout in LAYOUTS:
        assert Layout.find(str(layout), LAYOUTS) == layout
    assert Layout.find(2, LAYOUTS) == Layout.find(2, reversed(LAYOUTS)) == CUT
    assert Layout.find(2, (ONE, SPREAD)) == SPREAD
    assert Layout.find(4, LAYOUTS) is Layout.find("tp4dp1ep", LAYOUTS) is None


def test_a_policy_that_names_a_tp_means_cut_experts():
    def policy(**options):
        config = PATConfig.parse({"policy": options})
        return make_policy(config, LAYOUTS, lambda path: a_profile(), CostModel(), bound=100)

    assert policy(kind="static", tp=2).home == CUT
    assert policy(kind="static", tp="tp2dp1ep").home == SPREAD
    table = policy(kind="schedule", switch_at={4: "tp2dp1ep", 2: 2}).table
    assert table == ((2, CUT), (4, SPREAD))

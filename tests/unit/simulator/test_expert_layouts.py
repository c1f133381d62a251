"""Layouts that differ only in how experts lie: from a profile's file to a simulated run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pat_vllm
from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
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
from tests.unit.simulator.simple import follow

LAYOUTS = ONE, CUT, SPREAD = Layout(1, 2), Layout(2, 1), Layout(2, 1, "ep")
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def step_seconds(layout: Layout, batch: float) -> float:
    """One request is served fastest by cut experts, some by spread ones, many by replicas."""
    if layout == ONE:
        return 0.015 + 0.0004 * batch
    return 0.008 + 0.001 * batch if layout == CUT else 0.0105 + 0.0005 * batch


def profile_of(
    seconds: Callable[[Layout, float], float] = step_seconds,
    layouts: tuple[Layout, ...] = LAYOUTS,
    switch_seconds: float = 1e-4,
) -> Profile:
    """A profile of steps without noise; contexts cost nothing."""
    steps = tuple(
        StepSample.of(
            layout,
            StepShape(batch, batch * each, each, busy=busy),
            [seconds(layout, batch)] * 3,
        )
        for layout in layouts
        for busy in {1, layout.replicas}
        for batch in BATCHES
        for each in (64, 512)
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
        title="an invented mixture of experts",
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


PROFILE = profile_of()


# ---------------------------------------------------------------- files


def test_files_keep_the_kinds(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE
    content = json.loads(path.read_text())
    assert content["format"] == 2
    assert content["layouts"] == ["tp1dp2", "tp2dp1", "tp2dp1ep"]
    assert {step["layout"] for step in content["steps"]} == {*content["layouts"]}
    assert content["switches"][-1]["source"] == "tp2dp1ep"
    # A profile that is shipped.
    shipped = Profile.load(Path(pat_vllm.__file__).parent / "simulator/modelled/measured.json")
    assert shipped.layouts == (ONE, CUT)
    shipped.save(path)
    assert Profile.load(path) == shipped


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1, "layouts": [1, 3]}, r"of format 1.*make it again"),
        ({"format": 1, "ranks": "two"}, r"of format 1.*make it again"),
        ({"format": 1, "layouts": [1, 2], "steps": [{}]}, r"of format 1.*make it again"),
        ({"format": 1, "layouts": [1, 2], "steps": 7}, r"of format 1.*make it again"),
        ({"format": 3}, "has format 3, this version reads 1 and 2"),
        ({"layouts": ["tp1dp2", "tp2dp1", "tp2dp1", "tp2dp1ep"]}, "without repeats"),
        ({"layouts": ["tp1dp2", "tp2dp1"]}, "tp2dp1ep, which is not among layouts"),
        ({"layouts": ["tp1dp2", "two"]}, "expected the name of a layout"),
        ({"digest": "another"}, "digest does not match"),
    ],
)
def test_unreadable_files(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "profile.json"
    content = PROFILE.model_dump(mode="json") | changes
    path.write_text(json.dumps({"digest": profiles._digest(content), **content}))
    with pytest.raises(ProfileError, match=message):
        Profile.load(path)


def test_plans_measure_both_kinds() -> None:
    sizes = {1: 64, 2: 128}
    limits = EngineLimits(LAYOUTS, sizes, {1: 512, 2: 1024}, 4096, 16, {1: 2000, 2: 4000})
    for plan in (ProfilePlan.quick(limits), ProfilePlan.full(limits)):
        points = [point for point in plan.points if isinstance(point, StepPoint)]
        of = {
            layout: [replace(point, layout=CUT) for point in points if point.layout == layout]
            for layout in LAYOUTS
        }
        assert of[CUT] == of[SPREAD] and of[ONE]
        assert {point.layout for point in points[: plan.essential]} == {*LAYOUTS}
        pairs = {(p.source, p.target) for p in plan.points if isinstance(p, SwitchPoint)}
        assert pairs == {*itertools.permutations(LAYOUTS, 2)}


# ---------------------------------------------------------------- what is predicted


def test_steps_of_each_kind_are_predicted() -> None:
    """Each kind has a residual of its own, which the linear base cannot tell from the other's."""

    def bent(layout: Layout, batch: float) -> float:
        sign = {ONE: 0, CUT: 1, SPREAD: -1}[layout]
        return (0.01 + 0.0005 * batch) * (1 + 0.3 * sign * (4 <= batch <= 16))

    profile = profile_of(bent)
    model = StepTimeModel.fit(profile)
    for sample in profile.steps:
        assert model.step(sample.layout, sample.shape) == pytest.approx(sample.seconds, rel=0.05)


def test_slower_kind_than_in_its_profile_does_not_spoil_the_other() -> None:
    model = StepTimeModel.fit(PROFILE)
    shape = StepShape(8, 800, 100)
    usual = {layout: model.step(layout, shape) for layout in LAYOUTS}
    factors = {ONE: 1.0, CUT: 1.0, SPREAD: 2.0}
    for _ in range(40):
        for layout, factor in factors.items():
            model.observe(layout, shape, factor * usual[layout])
    for layout, factor in factors.items():
        assert model.step(layout, shape) == pytest.approx(factor * usual[layout], rel=0.1)


def switch_report(source: Layout, target: Layout, seconds: float) -> SwitchReport:
    parts = ("quiesce", "plan", "states", "kv", "weights", "activate", "rpc", "finish")
    seconds_of: dict[str, Any] = dict.fromkeys(parts, 0.0)
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
        tokens=400,
        **seconds_of,
    )


def test_kv_stays_between_kinds() -> None:
    """It costs nothing where no switch between the kinds was measured."""
    model = CostModel("auto", CarryRates(1e-3, dict.fromkeys(LAYOUTS, 1e-6)))
    assert model.choose(100, CUT, SPREAD, 4) == "migrate"
    assert model.choose(100, ONE, SPREAD, 4) == "recompute"
    assert model.seconds(SPREAD, CUT, 4, 10**6) == 0.0 < model.seconds(ONE, CUT, 4, 10**6)

    model.fit(profile_of(layouts=(ONE, CUT), switch_seconds=0.5))
    assert model.seconds(CUT, SPREAD, 4, 400) == model.seconds(CUT, SPREAD, 4, 10**9)
    for mode in ("migrate", "recompute"):
        model.mode = mode  # type: ignore[assignment]
        assert model.choose(100, CUT, SPREAD, 4) == "migrate"
        assert model.choose(100, ONE, SPREAD, 4) == mode
        assert model.seconds(CUT, SPREAD, 4, 400) == model.seconds(CUT, SPREAD, 4, 10**9)
    model.mode = "auto"
    # Each kind has its own switches.
    model.fit(profile_of(switch_seconds=0.5))
    model.observe(switch_report(ONE, SPREAD, seconds=1.0))
    assert model.seconds(ONE, SPREAD, 4, 400) == pytest.approx(1.0)
    assert model.seconds(ONE, CUT, 4, 400) == pytest.approx(0.5)

    placed = [Placed(f"r{i}", 0, 100 * i) for i in range(3)]
    wide, spread_wide = Layout(2, 2), Layout(2, 2, "ep")
    for ends in ((wide, spread_wide), (spread_wide, wide)):
        assert spread(placed, *ends) == {"r0": 0, "r1": 0, "r2": 0}
    assert {*spread(placed, Layout(1, 4), spread_wide).values()} == {0, 1}


# ---------------------------------------------------------------- what is planned


def best_layout(planner: Planner, live: int, start: Layout) -> Layout:
    zeros = np.zeros(live, np.int64)
    requests = LiveRequests(
        num_prompt_tokens=zeros + 100,
        num_output_tokens=zeros,
        max_tokens=zeros + 1000,
        exact=zeros > 0,
        group=np.arange(live),
        replica=zeros,
        num_computed_tokens=zeros + 100,
    )
    ahead = course(requests, np.full((live, 4), 200))
    return planner.outlook(ahead).plan(start).best


def planner_of(profile: Profile) -> Planner:
    return Planner(
        profile.layouts,
        StepTimeModel.fit(profile).seconds,
        lambda source, target, live, tokens: np.zeros(()),
        max_num_seqs=profile.max_num_seqs,
        kv_tokens=profile.kv_tokens,
    )


def test_planner_takes_the_faster_kind_at_each_number_of_requests() -> None:
    planner = planner_of(PROFILE)
    for live in range(1, 65):
        times = {layout: step_seconds(layout, max(1, live / layout.replicas)) for layout in LAYOUTS}
        (best,) = {best_layout(planner, live, start) for start in LAYOUTS}
        assert times[best] <= 1.02 * min(times.values()), live
    for live, fastest in ((1, CUT), (3, CUT), (8, SPREAD), (12, SPREAD), (24, ONE), (64, ONE)):
        assert best_layout(planner, live, CUT) == fastest


terms = st.tuples(st.floats(0.005, 0.02), st.floats(1e-4, 2e-3))


@settings(max_examples=15)
@given(st.fixed_dictionaries(dict.fromkeys(LAYOUTS, terms)), st.integers(1, 60))
def test_planner_takes_the_faster_kind_whatever_the_times(
    table: dict[Layout, tuple[float, float]], live: int
) -> None:
    def seconds(layout: Layout, batch: float) -> float:
        fixed, each = table[layout]
        return fixed + each * batch

    planner = planner_of(profile_of(seconds))
    times = {layout: seconds(layout, max(1, live / layout.replicas)) for layout in LAYOUTS}
    for start in LAYOUTS:
        # Predictions are within some percent of the profile; half steps are waited for in replicas.
        assert times[best_layout(planner, live, start)] <= 1.1 * min(times.values())


# ---------------------------------------------------------------- what is simulated


def test_switches_between_kinds_are_replayed() -> None:
    trace = traces.uniform(24, 10, 200, 200, seed=0)
    policy = follow(ONE, (6, SPREAD), (12, CUT), (18, SPREAD))
    truth, capacity = ReplayedTruth(PROFILE), ReplicaCapacity.of(PROFILE)
    run = simulate(trace, policy, truth, capacity)
    ends = [(switch.source, switch.target) for switch in run.switches]
    assert ends == [(ONE, SPREAD), (SPREAD, CUT), (CUT, SPREAD), (SPREAD, ONE)]
    assert run.tokens == sum(trace.lengths)
    assert run.prefilled == sum(trace.num_prompt_tokens), "no KV is lost"
    assert {*run.steps} == {*LAYOUTS}
    for switch in run.switches_on_the_way:
        assert switch.migrated == switch.num_seqs and not switch.recomputed
        assert (switch.kv_bytes == 0) == (switch.source.tp == switch.target.tp)
        assert switch.seconds - switch.quiesce == pytest.approx(1e-4, rel=0.01)
    for layout, steps in run.steps.items():
        mean = steps.seconds / steps.steps
        assert step_seconds(layout, 1) <= mean <= step_seconds(layout, 24)
    # Noise of another engine, which has no mixture, is that of the nearest layout.
    noisy = ReplayedTruth(PROFILE, measured_noise())
    assert simulate(trace, policy, noisy, capacity).seconds != run.seconds


def test_pat_uses_both_kinds_and_gains_by_it() -> None:
    truth, capacity = ReplayedTruth(PROFILE), ReplicaCapacity.of(PROFILE)
    batches = [traces.lognormal(64, 200, 1.0, 2000, seed) for seed in range(2)]

    def runs(profile: Profile) -> list[Any]:
        policy = AdaptivePolicy(profile, bound=2000, timer=lambda: 0.0)
        return simulate_batches(batches, policy, truth, capacity)

    ours = runs(PROFILE)
    assert {switch.target for run in ours[1:] for switch in run.switches} == {*LAYOUTS}
    seconds = sum(run.seconds for run in ours)
    for kinds in ((ONE, CUT), (ONE, SPREAD)):
        assert seconds < sum(run.seconds for run in runs(profile_of(layouts=kinds)))
    for layout in LAYOUTS:
        static = simulate_batches(batches, StayPolicy(layout), truth, capacity)
        assert seconds < sum(run.seconds for run in static)


# ---------------------------------------------------------------- what users name


def test_layouts_are_chosen_by_name_or_tp() -> None:
    for layout in LAYOUTS:
        assert Layout.find(str(layout), LAYOUTS) == layout
    assert Layout.find(2, LAYOUTS) == Layout.find(2, reversed(LAYOUTS)) == CUT
    assert Layout.find(2, (ONE, SPREAD)) == SPREAD
    assert Layout.find(4, LAYOUTS) is Layout.find("tp4dp1ep", LAYOUTS) is None

    def policy(**options: Any) -> Any:
        config = PATConfig.parse({"policy": options})
        return make_policy(config, LAYOUTS, lambda path: PROFILE, CostModel(), bound=100)

    assert policy(kind="static", tp=2).home == CUT
    assert policy(kind="static", tp="tp2dp1ep").home == SPREAD
    table = policy(kind="schedule", switch_at={4: "tp2dp1ep", 2: 2}).table
    assert table == ((2, CUT), (4, SPREAD))

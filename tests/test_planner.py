"""The planner against brute force, and what must hold of any plan."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.predictor.planner import Planner, course
from pat_vllm.predictor.state import LiveRequests

RANKS = 4
LAYOUTS = (Layout(1, 4), Layout(2, 2), Layout(4, 1))
MEMORY = {layout.tp: 10**9 for layout in LAYOUTS}


MAX_NUM_SEQS = {layout.tp: 1024 for layout in LAYOUTS}


def make_planner(step, switch, max_num_seqs=MAX_NUM_SEQS, kv_tokens=MEMORY):
    return Planner(LAYOUTS, step, switch, max_num_seqs=max_num_seqs, kv_tokens=kv_tokens)


def steps(base, slope):
    """A step takes `base[tp] + slope[tp] * batch`."""
    return lambda tp, batch, *rest: base[tp] + slope[tp] * np.asarray(batch, float)


def costs(fixed, per_token=0.0):
    """A switch takes `fixed + per_token * tokens`."""
    return lambda source, target, live, tokens: fixed + per_token * tokens


def requests(contexts, replicas=4):
    count = len(contexts)
    zeros = np.zeros(count, np.int64)
    return LiveRequests(
        num_prompt_tokens=np.array(contexts, np.int64),
        num_output_tokens=zeros,
        max_tokens=zeros + 1000,
        exact=zeros > 0,
        group=np.arange(count),
        replica=np.arange(count) % replicas,
        num_computed_tokens=np.array(contexts, np.int64),
    )


def waits(layout, step):
    return 0.5 * (1 - 1 / layout.replicas) * step


def brute_force(planner, start, ahead):
    """The least expected time over every assignment of layouts to groups."""
    groups = len(ahead.live)
    times = {one: planner.step_seconds(one, ahead) for one in LAYOUTS}
    best = math.inf
    for path in itertools.product(LAYOUTS, repeat=groups):
        total, here = 0.0, start
        for group, layout in zip(reversed(range(groups)), path, strict=True):
            if layout != here:
                total += float(
                    planner._switch(here, layout, ahead.most[group], ahead.context[group])
                )
                total += waits(here, times[here][group])
            total += times[layout][group] * ahead.steps[group]
            here = layout
        best = min(best, total)
    return best


tables = st.fixed_dictionaries({tp: st.floats(0.001, 0.1) for tp in (1, 2, 4)})


@given(
    remaining=st.lists(
        st.lists(st.integers(1, 300), min_size=3, max_size=3), min_size=1, max_size=6
    ),
    base=tables,
    slope=tables,
    fixed=st.floats(0, 1),
    per_token=st.floats(0, 1e-3),
    start=st.sampled_from(LAYOUTS),
)
def test_the_plan_is_the_cheapest_of_all_paths(remaining, base, slope, fixed, per_token, start):
    planner = make_planner(steps(base, slope), costs(fixed, per_token))
    ahead = course(requests([10 + i for i in range(len(remaining))]), np.array(remaining))
    plan = planner.plan(start, ahead)
    total = brute_force(planner, start, ahead)
    assert min(plan.stay, *plan.go.values()) == pytest.approx(total)
    assert plan.stay <= plan.never + 1e-9
    assert plan.best == start or plan.go[plan.best] < plan.stay


@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), st.integers(1, 8))
def test_a_course_keeps_steps_and_tokens(lengths, futures):
    rng = np.random.default_rng(len(lengths))
    remaining = np.stack([rng.permutation(lengths) for _ in range(futures)], axis=1)
    ahead = course(requests([100] * len(lengths)), remaining)
    assert ahead.steps.sum() == pytest.approx(max(lengths)), "steps until the last response ends"
    assert (ahead.steps * ahead.live).sum() == pytest.approx(sum(lengths), rel=1e-6)
    assert (np.diff(ahead.most) > 0).all() and ahead.most[-1] == len(lengths)
    assert (ahead.live <= ahead.most + 1e-9).all() and (ahead.live >= 1).all()
    assert (ahead.longest <= 100 + max(lengths) + 1e-6).all()
    assert (ahead.context <= ahead.live * (100 + max(lengths)) + 1e-6).all()


def crossover():
    """Replicas are faster for many requests, one group for few."""
    return steps({1: 0.030, 2: 0.020, 4: 0.010}, {1: 0.001, 2: 0.001, 4: 0.001})


def test_a_tail_is_worth_a_switch_and_a_full_batch_is_not():
    planner = make_planner(crossover(), costs(0.05))
    full = course(requests([50] * 64), np.full((64, 4), 100))
    tail = course(requests([50] * 2), np.full((2, 4), 500))
    assert planner.plan(LAYOUTS[0], full).best == LAYOUTS[0]
    assert planner.plan(LAYOUTS[0], tail).best == LAYOUTS[2]
    assert planner.plan(LAYOUTS[2], full).best != LAYOUTS[2], "and back, when many have come"


def test_several_switches_pay_where_each_does():
    """64 requests end one by one: every layout has its time."""
    planner = make_planner(crossover(), costs(1e-4))
    remaining = np.tile(np.arange(1, 65)[:, None] * 20, (1, 4))
    where = Layout(1, 4)
    path = [where]
    for done in range(64):
        ahead = course(requests([50] * (64 - done)), remaining[done:] - 20 * done)
        where = planner.plan(where, ahead).best
        if where != path[-1]:
            path.append(where)
    assert path == list(LAYOUTS)


def test_what_a_replica_cannot_hold_waits():
    one_at_a_time = {"max_num_seqs": MAX_NUM_SEQS | {4: 1}}
    little_memory = {"kv_tokens": MEMORY | {4: 100}}
    free = make_planner(crossover(), costs(0))
    ahead = course(requests([50] * 8), np.full((8, 1), 100))
    for limits in (one_at_a_time, little_memory):
        bound = make_planner(crossover(), costs(0), **limits)
        assert (
            bound.step_seconds(LAYOUTS[2], ahead)[-1] > 2 * free.step_seconds(LAYOUTS[2], ahead)[-1]
        )


def test_a_layout_has_its_own_limit():
    """One whose replicas run more requests at once is not taken to queue them."""
    ahead = course(requests([50] * 64), np.full((64, 1), 100))
    per_rank = {layout.tp: 16 * layout.tp for layout in LAYOUTS}
    free, bound, growing = (
        make_planner(crossover(), costs(0), max_num_seqs=limits)
        for limits in (MAX_NUM_SEQS, dict.fromkeys(per_rank, 16), per_rank)
    )
    for layout in LAYOUTS:
        alone = free.step_seconds(layout, ahead)
        assert (growing.step_seconds(layout, ahead) == alone).all(), "64 = 16 x 4 ranks"
        queued = (bound.step_seconds(layout, ahead) > alone).any()
        assert queued == (layout.tp > 1), "16 on each of 4 replicas"


def test_expected_requests_shorten_the_horizon():
    """A switch that pays within 20 s does not pay when a burst comes in one that undoes it."""
    planner = make_planner(crossover(), costs(0.5))
    ahead = course(requests([50] * 2), np.full((2, 4), 1000))
    assert planner.plan(LAYOUTS[0], ahead).best == LAYOUTS[2]
    soon = planner.plan(LAYOUTS[0], ahead, horizon=1.0, afterwards=LAYOUTS[0])
    assert soon.best == LAYOUTS[0]
    assert soon.never == pytest.approx(1.0)
    assert planner.fastest(ahead, 100) == LAYOUTS[0]
    assert planner.fastest(ahead, 0) == LAYOUTS[2]


def test_optimism_is_about_one_layout():
    planner = make_planner(crossover(), costs(0.01))
    ahead = course(requests([50] * 64), np.full((64, 4), 100))
    plain = planner.plan(LAYOUTS[0], ahead)
    hoped = planner.plan(LAYOUTS[0], ahead, optimism={LAYOUTS[2]: 0.5})
    assert hoped.never == plain.never
    assert hoped.go[LAYOUTS[2]] < plain.go[LAYOUTS[2]]
    assert hoped.step[LAYOUTS[2]] == pytest.approx(plain.step[LAYOUTS[2]] / 2)

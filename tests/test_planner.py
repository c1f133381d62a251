"""The planner of layouts and draft lengths against brute force, and what holds of any plan."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import PLAIN, Drafting
from pat_vllm.predictor.planner import Planner, _schedule, course
from pat_vllm.predictor.state import LiveRequests
from tests.support.mutation import mutated

RANKS = 4
LAYOUTS = (Layout(1, 4), Layout(2, 2), Layout(4, 1))
MEMORY = {layout.tp: 10**9 for layout in LAYOUTS}


MAX_NUM_SEQS = {layout.tp: 1024 for layout in LAYOUTS}


def plan_of(planner, layout, ahead, **drafting):
    return planner.outlook(ahead, **drafting).plan(layout)


def make_planner(step, switch, max_num_seqs=MAX_NUM_SEQS, kv_tokens=MEMORY):
    return Planner(LAYOUTS, step, switch, max_num_seqs=max_num_seqs, kv_tokens=kv_tokens)


def steps(base, slope, draft=0.0, drafting=0.0):
    """A step takes `base[tp] + slope[tp] * batch`, and more per draft and for drafting."""

    def seconds(layout, batch, context, longest, prefill=0, busy=1, drafts=0.0, k=0):
        plain = base[layout.tp] + slope[layout.tp] * np.asarray(batch, float)
        return plain + draft * drafts + drafting * (np.asarray(k) > 0)

    return seconds


def drafting(tokens, hits=1.0, hoped=None, lengths=(0, 1, 2, 4, 7)):
    """What draft lengths give: `tokens`, where a share of the requests has drafts."""
    lengths, tokens = np.array(lengths), np.array(tokens, float)
    hoped = tokens if hoped is None else np.array(hoped, float)
    return Drafting(lengths, tokens, hits * lengths, hoped)


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


def one_by_one(planner, layout, ahead, drafts):
    """Seconds per token and tokens per step of the best draft length, in each group."""
    every = []
    for i in range(len(drafts.lengths)):
        fields = [getattr(drafts, name)[i : i + 1] for name in Drafting.__dataclass_fields__]
        every.append(planner.token_seconds(layout, ahead, Drafting(*fields)))
    seconds = np.array(every)
    return seconds.min(axis=0), drafts.tokens[seconds.argmin(axis=0)]


def brute_force(planner, start, ahead, drafts=PLAIN):
    """The least expected time over every assignment of layouts and draft lengths to groups."""
    groups = len(ahead.live)
    times = {one: one_by_one(planner, one, ahead, drafts) for one in LAYOUTS}
    best = math.inf
    for path in itertools.product(LAYOUTS, repeat=groups):
        total, here = 0.0, start
        for group, layout in zip(reversed(range(groups)), path, strict=True):
            seconds, tokens = times[layout][0][group], times[layout][1][group]
            if layout != here:
                total += float(
                    planner._switch(here, layout, ahead.most[group], ahead.context[group])
                )
                # The steps in flight end first. Then there is a step without drafts to verify.
                total += waits(here, times[here][0][group] * times[here][1][group])
                total += seconds * tokens - seconds
            total += seconds * ahead.steps[group]
            here = layout
        best = min(best, total)
    return best


tables = st.fixed_dictionaries({tp: st.floats(0.001, 0.1) for tp in (1, 2, 4)})


@st.composite
def expectations(draw, lengths=(0, 1, 2, 4, 7)):
    """Tokens per step that grow with the draft length."""
    more = draw(st.lists(st.floats(0, 1), min_size=len(lengths), max_size=len(lengths)))
    tokens = 1 + np.cumsum([0.0, *more[1:]])
    return drafting(tokens, hits=draw(st.floats(0, 1)), lengths=lengths)


remainders = st.lists(st.lists(st.integers(1, 300), min_size=3, max_size=3), min_size=1, max_size=6)


@given(
    remaining=remainders,
    base=tables,
    slope=tables,
    draft=st.floats(0, 0.02),
    fixed=st.floats(0, 1),
    per_token=st.floats(0, 1e-3),
    start=st.sampled_from(LAYOUTS),
    drafts=st.one_of(st.just(PLAIN), expectations()),
)
def test_the_plan_is_the_cheapest_of_all_paths(
    remaining, base, slope, draft, fixed, per_token, start, drafts
):
    planner = make_planner(steps(base, slope, draft, 1e-3), costs(fixed, per_token))
    # Long enough that at most one group is cut: paths are many.
    ahead = course(requests([1000 + i for i in range(len(remaining))]), np.array(remaining))
    plan = plan_of(planner, start, ahead, drafting=drafts)
    total = brute_force(planner, start, ahead, drafts)
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
    assert (np.diff(ahead.most) >= 0).all() and ahead.most[-1] == len(lengths)
    assert (ahead.live <= ahead.most + 1e-9).all() and (ahead.live >= 1).all()
    assert (ahead.longest <= 100 + max(lengths) + 1e-6).all()
    assert (ahead.context <= ahead.live * (100 + max(lengths)) + 1e-6).all()


@given(st.integers(1, 200), st.integers(1, 2000), st.integers(1, 3000))
def test_contexts_grow_little_in_a_group(count, context, steps):
    """Responses that all end together: their groups differ by contexts, the longest first."""
    ahead = course(requests([context] * count), np.full((count, 2), steps))
    longest = ahead.longest[ahead.steps > 1e-6]
    assert (np.diff(longest) < 0).all() and 1 <= len(longest) <= 4
    growth = steps / len(longest)
    assert longest[-1] == pytest.approx(context + growth / 2)
    assert longest[0] == pytest.approx(context + steps - growth / 2)
    assert len(longest) == 4 or growth <= 0.25 * (context + steps / 2) + 1e-6
    assert ahead.context[ahead.steps > 1e-6] == pytest.approx(longest * count)


def crossover():
    """Replicas are faster for many requests, one group for few."""
    return steps({1: 0.030, 2: 0.020, 4: 0.010}, {1: 0.001, 2: 0.001, 4: 0.001})


def test_a_tail_is_worth_a_switch_and_a_full_batch_is_not():
    planner = make_planner(crossover(), costs(0.05))
    full = course(requests([50] * 64), np.full((64, 4), 100))
    tail = course(requests([50] * 2), np.full((2, 4), 500))
    assert plan_of(planner, LAYOUTS[0], full).best == LAYOUTS[0]
    assert plan_of(planner, LAYOUTS[0], tail).best == LAYOUTS[2]
    assert plan_of(planner, LAYOUTS[2], full).best != LAYOUTS[2], "and back, when many have come"


def test_several_switches_pay_where_each_does():
    """64 requests end one by one: every layout has its time."""
    planner = make_planner(crossover(), costs(1e-4))
    remaining = np.tile(np.arange(1, 65)[:, None] * 20, (1, 4))
    where = Layout(1, 4)
    path = [where]
    for done in range(64):
        ahead = course(requests([50] * (64 - done)), remaining[done:] - 20 * done)
        where = plan_of(planner, where, ahead).best
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
            bound.token_seconds(LAYOUTS[2], ahead)[-1]
            > 2 * free.token_seconds(LAYOUTS[2], ahead)[-1]
        )


def test_where_memory_is_short_tokens_are_computed_again():
    """As many as are generated: by simulation it is 0.75 to 0.95 of them."""

    def step(layout, batch, context, longest, prefill=0, busy=1, drafts=0.0, k=0):
        return 1e-3 * np.asarray(batch, float) + 1e-4 * prefill

    ahead = course(requests([50] * 8), np.full((8, 1), 100))
    free = make_planner(step, costs(0)).token_seconds(LAYOUTS[1], ahead)
    short = make_planner(step, costs(0), kv_tokens=MEMORY | {2: 300})
    queued = make_planner(step, costs(0), max_num_seqs=MAX_NUM_SEQS | {2: 2})
    # With more than four live requests, two replicas of 300 tokens have too little.
    more = short.token_seconds(LAYOUTS[1], ahead) - free
    expected = np.where(ahead.context > 2 * 300, 1e-4 * ahead.live / 2, 0.0)
    assert more == pytest.approx(expected) and 0 < np.count_nonzero(expected) < len(expected)
    assert queued.token_seconds(LAYOUTS[1], ahead) == pytest.approx(free), "nothing is lost"


def test_memory_that_is_short_later_is_seen_now():
    """Eight requests of 50 tokens and, at the end, 450, where a replica holds 1,200: half fit."""
    ahead = course(requests([50] * 8), np.full((8, 1), 400))
    short = make_planner(crossover(), costs(0), kv_tokens=MEMORY | {4: 1200})
    free = make_planner(crossover(), costs(0))
    more = short.token_seconds(LAYOUTS[2], ahead) / free.token_seconds(LAYOUTS[2], ahead)
    more = more[ahead.steps > 1e-6]
    assert (np.diff(more) <= 0).all() and more[0] > 1.5 and more[-1] == 1


def test_a_switch_computes_again_what_its_target_cannot_hold():
    def step(layout, batch, context, longest, prefill=0, busy=1, drafts=0.0, k=0):
        return 1e-3 * np.asarray(batch, float) + 1e-4 * prefill

    ahead = course(requests([1000] * 8), np.full((8, 1), 10))
    memory = MEMORY | {2: 3000, 4: 7000}
    planner = make_planner(step, costs(0.5), kv_tokens=memory)
    plain = make_planner(step, costs(0.5))
    held = ahead.context[-1]
    # Of what the source holds, and over the replicas of the target.
    lost = {(1, 2): held - 6000, (4, 2): 1000, (1, 4): held - 7000, (2, 1): 0, (4, 1): 0, (2, 4): 0}
    for source in LAYOUTS:
        more = plan_of(planner, source, ahead).cost, plan_of(plain, source, ahead).cost
        waiting = waits(source, planner.token_seconds(source, ahead)[-1])
        for target in more[0]:
            again = 1e-4 * lost[source.tp, target.tp] / target.replicas
            assert more[1][target] == pytest.approx(0.5 + waits(source, 8e-3 / source.replicas))
            assert more[0][target] == pytest.approx(0.5 + waiting + again)


def test_a_layout_has_its_own_limit():
    """One whose replicas run more requests at once is not taken to queue them."""
    ahead = course(requests([50] * 64), np.full((64, 1), 100))
    per_rank = {layout.tp: 16 * layout.tp for layout in LAYOUTS}
    free, bound, growing = (
        make_planner(crossover(), costs(0), max_num_seqs=limits)
        for limits in (MAX_NUM_SEQS, dict.fromkeys(per_rank, 16), per_rank)
    )
    for layout in LAYOUTS:
        alone = free.token_seconds(layout, ahead)
        assert (growing.token_seconds(layout, ahead) == alone).all(), "64 = 16 x 4 ranks"
        queued = (bound.token_seconds(layout, ahead) > alone).any()
        assert queued == (layout.tp > 1), "16 on each of 4 replicas"


def test_hope_is_about_one_layout():
    planner = make_planner(crossover(), costs(0.01))
    ahead = course(requests([50] * 64), np.full((64, 4), 100))
    plain = plan_of(planner, LAYOUTS[0], ahead)
    hoped = planner.outlook(ahead).hoped(LAYOUTS[2], 2.0).plan(LAYOUTS[0])
    assert hoped.never == plain.never
    assert hoped.go[LAYOUTS[2]] < plain.go[LAYOUTS[2]]
    assert hoped.step[LAYOUTS[2]] == pytest.approx(plain.step[LAYOUTS[2]] / 2)


# Draft lengths


def long_tail(count=64):
    return course(requests([50] * count), np.tile(np.arange(1, count + 1)[:, None] * 20, (1, 4)))


def at_batch(plan, layout, batch):
    """The draft length that a plan has for a replica's step."""
    return next(k for first, last, k in plan.drafts[layout] if first <= batch <= last)


@given(remaining=remainders, base=tables, slope=tables, start=st.sampled_from(LAYOUTS))
def test_drafts_that_give_nothing_change_nothing(remaining, base, slope, start):
    ahead = course(requests([10] * len(remaining)), np.array(remaining))
    planner = make_planner(steps(base, slope, 1e-3, 1e-3), costs(0.1))
    plain = plan_of(planner, start, ahead)
    useless = plan_of(planner, start, ahead, drafting=drafting([1.0] * 5))
    assert useless == plain, "to the last digit"
    assert all(one == ((1, 1024, 0),) for one in plain.drafts.values())


@given(
    base=tables,
    slope=tables,
    draft=st.floats(0, 0.02),
    looking=st.floats(0, 0.05),
    drafts=expectations(),
    count=st.integers(1, 8),
)
def test_each_batch_size_has_its_best_length(base, slope, draft, looking, drafts, count):
    """Few requests are planned for one by one; in one group of four all are in one batch."""
    seconds = steps(base, slope, draft, looking)
    planner = make_planner(seconds, costs(0.1))
    ahead = course(requests([50] * count), np.tile(np.arange(1, count + 1)[:, None], (1, 2)))
    plan = plan_of(planner, LAYOUTS[0], ahead, drafting=drafts)
    for batch in range(1, count + 1):
        per_token = {
            int(k): seconds(LAYOUTS[2], batch, 0, 0, 0, 1, batch * proposed, k) / tokens
            for k, tokens, proposed in zip(
                drafts.lengths, drafts.tokens, drafts.drafts, strict=True
            )
        }
        best = pytest.approx(min(per_token.values()))
        assert planner.token_seconds(LAYOUTS[2], ahead, drafts)[batch - 1] == best
        assert per_token[at_batch(plan, LAYOUTS[2], batch)] == best


@given(
    contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=80),
    most=st.fixed_dictionaries({tp: st.integers(1, 300) for tp in (1, 2, 4)}),
    memory=st.fixed_dictionaries({tp: st.integers(10, 10**5) for tp in (1, 2, 4)}),
    drafts=st.one_of(st.just(PLAIN), expectations(), expectations((0, 3))),
)
def test_tables_name_a_length_for_every_batch_size(contexts, most, memory, drafts):
    rng = np.random.default_rng(len(contexts))
    planner = make_planner(
        steps({1: 0.03, 2: 0.02, 4: 0.01}, dict.fromkeys((1, 2, 4), 1e-3), 1e-3),
        costs(0),
        most,
        memory,
    )
    ahead = course(requests(contexts), rng.integers(1, 2000, (len(contexts), 4)))
    for layout, table in plan_of(planner, LAYOUTS[0], ahead, drafting=drafts).drafts.items():
        firsts, lasts, lengths = zip(*table, strict=True)
        assert firsts == (1, *(last + 1 for last in lasts[:-1])) and lasts[-1] == most[layout.tp]
        assert set(lengths) <= {*drafts.lengths}
        assert all(type(number) is int for entry in table for number in entry)


@given(
    remaining=remainders,
    base=tables,
    slope=tables,
    drafts=expectations(),
    data=st.data(),
)
def test_more_acceptance_never_takes_longer(remaining, base, slope, drafts, data):
    """But for a switch, which waits for longer steps."""
    planner = make_planner(steps(base, slope, 1e-3, 1e-3), costs(0.1))
    ahead = course(requests([10] * len(remaining)), np.array(remaining))
    more = np.array(data.draw(st.lists(st.floats(0, 2), min_size=5, max_size=5))) * (
        drafts.lengths > 0
    )
    better = Drafting(drafts.lengths, drafts.tokens + more, drafts.drafts, drafts.tokens + more)
    for layout in LAYOUTS:
        less = plan_of(planner, layout, ahead, drafting=drafts)
        assert plan_of(planner, layout, ahead, drafting=better).never <= less.never
        now, then = (planner.token_seconds(layout, ahead, one) for one in (drafts, better))
        assert (then <= now).all()


def check_tail_and_bulk():
    """Verifying takes as long as decoding: it pays only where reading the weights is most of it."""
    planner = make_planner(
        steps({1: 0.030, 2: 0.020, 4: 0.010}, dict.fromkeys((1, 2, 4), 1e-3), 1e-3), costs(0.05)
    )
    plan = plan_of(planner, LAYOUTS[0], long_tail(), drafting=drafting([1, 1.4, 1.6, 1.8, 1.9]))
    for layout in LAYOUTS:
        lengths = [at_batch(plan, layout, batch) for batch in (1, 16, 64 // layout.replicas)]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] >= 2
    assert at_batch(plan, LAYOUTS[2], 64) == 0
    # A table goes on where more requests come.
    assert at_batch(plan, LAYOUTS[2], 1000) == 0


def test_the_tail_has_longer_drafts_than_the_bulk():
    check_tail_and_bulk()


def check_hope():
    alike = dict.fromkeys((1, 2, 4), 0.01)
    planner = make_planner(steps(alike, alike, 1e-4), costs(0.05))
    known = drafting([1, 1, 1, 1, 1])
    hopeful = drafting([1, 1, 1, 1, 1], hoped=[1, 1.2, 1.3, 1.4, 1.5])
    plan = plan_of(planner, LAYOUTS[0], long_tail(8), drafting=known)
    tried = plan_of(planner, LAYOUTS[0], long_tail(8), drafting=hopeful)
    assert (tried.never, tried.go, tried.step) == (plan.never, plan.go, plan.step)
    assert {k for table in plan.drafts.values() for _, _, k in table} == {0}
    assert {k for table in tried.drafts.values() for _, _, k in table} == {7}


def test_hope_decides_what_is_tried_and_not_what_is_expected():
    check_hope()


def check_drain():
    """A switch waits for steps, however many tokens they give."""
    planner = make_planner(crossover(), costs(0.05))
    ahead = course(requests([50] * 2), np.full((2, 4), 500))
    four = Drafting(*(np.array([one]) for one in (4, 2.0, 3.0, 2.0)))
    plain, drafted = (plan_of(planner, LAYOUTS[0], ahead, drafting=one) for one in (PLAIN, four))
    assert drafted.never == pytest.approx(plain.never / 2)
    assert drafted.step == pytest.approx(plain.step)
    # The first step afterwards gives one token where two were expected.
    more = 0.5 * drafted.step[LAYOUTS[2]]
    assert drafted.cost[LAYOUTS[2]] == pytest.approx(plain.cost[LAYOUTS[2]] + more)


def test_a_switch_waits_for_steps_and_drops_drafts():
    check_drain()


@pytest.mark.parametrize(
    "function, changes, check",
    [
        (Planner._pace, {"drafting.lengths[hoped]": "drafting.lengths[best]"}, check_hope),
        (Planner._pace, {"token = tokens.min(axis=0)": "token = seconds[0]"}, check_drain),
        (Planner._switch_seconds, {"(pace.tokens - 1)": "0"}, check_drain),
        (Planner._switch_seconds, {"(pace.token * pace.tokens)": "pace.token"}, check_drain),
        (Planner.outlook, {"pace.token[-1] * pace.tokens[-1]": "pace.token[-1]"}, check_drain),
        (_schedule, {"pace.lengths[order]": "pace.lengths[order[::-1]]"}, check_tail_and_bulk),
    ],
)
def test_mistakes_are_seen(function, changes, check):
    with mutated(function, changes), pytest.raises(AssertionError):
        check()

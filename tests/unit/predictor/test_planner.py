"""The planner of layouts and draft lengths against brute force, and what holds of any plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import PLAIN, DraftYield
from pat_vllm.predictor.forecast import BatchForecast, forecast
from pat_vllm.predictor.planner import Plan, Planner, StepSeconds
from pat_vllm.predictor.state import Floats
from tests.unit.predictor.examples import live_requests

LAYOUTS = ONE, TWO, FOUR = (Layout(1, 4), Layout(2, 2), Layout(4, 1))
MEMORY = {layout.tp: 10**9 for layout in LAYOUTS}
MAX_NUM_SEQS = {layout.tp: 1024 for layout in LAYOUTS}
SLOPE = dict.fromkeys(MEMORY, 0.001)
Table = Mapping[int, float]
"""A number by tp."""
Rows = list[list[int]]


def plan_of(planner: Planner, layout: Layout, ahead: BatchForecast, **options: Any) -> Plan:
    return planner.layout_costs(ahead, **options).plan(layout)


def make_planner(
    step: StepSeconds, cost: float = 0.0, per_token: float = 0.0, **limits: Any
) -> Planner:
    """A switch takes `cost + per_token * tokens`."""
    limits = {"max_num_seqs": MAX_NUM_SEQS, "kv_tokens": MEMORY} | limits
    return Planner(LAYOUTS, step, lambda a, b, live, tokens: cost + per_token * tokens, **limits)


def steps(
    base: Table, slope: Table = SLOPE, draft: float = 0, draft_yield: float = 0, prompt: float = 0
) -> StepSeconds:
    """A step takes `base[tp] + slope[tp] * batch`, and more per draft, for drafting and per prompt
    token."""

    def seconds(
        layout: Layout,
        batch: Any,
        context: Any,
        longest: Any,
        prefill: int = 0,
        busy: Any = 1,
        drafts: Any = 0,
        k: Any = 0,
    ) -> Floats:
        plain = base[layout.tp] + slope[layout.tp] * np.asarray(batch, float) + prompt * prefill
        return np.asarray(plain + draft * drafts + draft_yield * (np.asarray(k) > 0))

    return seconds


CROSSOVER = steps({1: 0.030, 2: 0.020, 4: 0.010})
"""Replicas are faster for many requests, one group for few."""
VERIFYING = steps({1: 0.030, 2: 0.020, 4: 0.010}, draft=1e-3)
"""Verifying takes as long as decoding: it pays only where reading the weights is most of it."""


def draft_yield(
    tokens: Sequence[float],
    hits: float = 1.0,
    lengths: Sequence[int] = (0, 1, 2, 4, 7),
) -> DraftYield:
    """What draft lengths give: `tokens`, where a share of the requests has drafts."""
    each = np.array(tokens, float)
    return DraftYield(np.array(lengths), each, hits * np.array(lengths))


def batch_of(contexts: Sequence[int], remaining: Any) -> BatchForecast:
    """What is ahead of n requests that still generate `remaining` tokens: a number, [n], or
    [n, futures]."""
    left = np.array(remaining)
    if left.ndim < 2:
        left = np.broadcast_to(left, len(contexts))[:, None]
    return forecast(live_requests(contexts), left)


def waits(layout: Layout, step: float) -> float:
    return 0.5 * (1 - 1 / layout.replicas) * step


def of_each_length(
    planner: Planner, layout: Layout, ahead: BatchForecast, drafts: DraftYield
) -> tuple[Floats, Floats]:
    """Seconds per token and tokens per step of the best draft length, in each group."""
    every = []
    for i in range(len(drafts.lengths)):
        fields = [getattr(drafts, name)[i : i + 1] for name in DraftYield.__dataclass_fields__]
        every.append(planner.token_seconds(layout, ahead, DraftYield(*fields)))
    seconds = np.array(every)
    return seconds.min(axis=0), drafts.tokens[seconds.argmin(axis=0)]


def brute_force(planner: Planner, start: Layout, ahead: BatchForecast, drafts: DraftYield) -> float:
    """The least expected time over every assignment of layouts and draft lengths to groups."""
    groups = len(ahead.live)
    times = {layout: of_each_length(planner, layout, ahead, drafts) for layout in LAYOUTS}
    best = math.inf
    for path in itertools.product(LAYOUTS, repeat=groups):
        total, here = 0.0, start
        for group, layout in zip(reversed(range(groups)), path, strict=True):
            seconds, tokens = (float(values[group]) for values in times[layout])
            if layout != here:
                live, context = ahead.most[group], ahead.context[group]
                total += float(planner._switch(here, layout, live, context))
                # The steps in flight end first. Then there is a step without drafts to verify.
                total += waits(here, float(times[here][0][group] * times[here][1][group]))
                total += seconds * tokens - seconds
            total += seconds * float(ahead.steps[group])
            here = layout
        best = min(best, total)
    return best


tables = st.fixed_dictionaries({tp: st.floats(0.001, 0.1) for tp in (1, 2, 4)})
remainders = st.lists(st.lists(st.integers(1, 300), min_size=3, max_size=3), min_size=1, max_size=6)


@st.composite
def expectations(draw: st.DrawFn, lengths: Sequence[int] = (0, 1, 2, 4, 7)) -> DraftYield:
    """Tokens per step that grow with the draft length."""
    more = draw(st.lists(st.floats(0, 1), min_size=len(lengths), max_size=len(lengths)))
    tokens = 1 + np.cumsum([0.0, *more[1:]])
    return draft_yield(tokens.tolist(), hits=draw(st.floats(0, 1)), lengths=lengths)


# Layouts


@given(
    remaining=remainders,
    work=st.tuples(tables, tables, st.floats(0, 0.02)),
    cost=st.tuples(st.floats(0, 1), st.floats(0, 1e-3)),
    start=st.sampled_from(LAYOUTS),
    drafts=st.one_of(st.just(PLAIN), expectations()),
)
def test_the_plan_is_the_cheapest_of_all_paths(
    remaining: Rows, work: tuple[Table, Table, float], cost: Any, start: Layout, drafts: DraftYield
) -> None:
    planner = make_planner(steps(*work, 1e-3), *cost)
    # Long enough that at most one group is cut: paths are many.
    ahead = batch_of([1000 + i for i in range(len(remaining))], remaining)
    plan = plan_of(planner, start, ahead, draft_yield=drafts)
    total = brute_force(planner, start, ahead, drafts)
    assert min(plan.switch_later, *plan.switch_now.values()) == pytest.approx(total)
    assert plan.switch_later <= plan.no_switch + 1e-9
    assert plan.best == start or plan.switch_now[plan.best] < plan.switch_later


@settings(max_examples=60)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=200), st.integers(1, 8))
def test_a_course_keeps_steps_and_tokens(lengths: list[int], futures: int) -> None:
    rng = np.random.default_rng(len(lengths))
    remaining = np.stack([rng.permutation(lengths) for _ in range(futures)], axis=1)
    ahead = batch_of([100] * len(lengths), remaining)
    assert ahead.steps.sum() == pytest.approx(max(lengths)), "steps until the last response ends"
    assert (ahead.steps * ahead.live).sum() == pytest.approx(sum(lengths), rel=1e-6)
    assert (np.diff(ahead.most) >= 0).all() and ahead.most[-1] == len(lengths)
    assert (ahead.live <= ahead.most + 1e-9).all() and (ahead.live >= 1).all()
    assert (ahead.longest <= 100 + max(lengths) + 1e-6).all()
    assert (ahead.context <= ahead.live * (100 + max(lengths)) + 1e-6).all()


@settings(max_examples=60)
@given(st.integers(1, 200), st.integers(1, 2000), st.integers(1, 3000))
def test_contexts_grow_little_in_a_group(count: int, context: int, left: int) -> None:
    """Responses that all end together: their groups differ by contexts, the longest first."""
    ahead = batch_of([context] * count, np.full((count, 2), left))
    longest = ahead.longest[ahead.steps > 1e-6]
    assert (np.diff(longest) < 0).all() and 1 <= len(longest) <= 4
    growth = left / len(longest)
    assert longest[-1] == pytest.approx(context + growth / 2)
    assert longest[0] == pytest.approx(context + left - growth / 2)
    assert len(longest) == 4 or growth <= 0.25 * (context + left / 2) + 1e-6
    assert ahead.context[ahead.steps > 1e-6] == pytest.approx(longest * count)


def test_what_a_replica_cannot_run_at_once_waits() -> None:
    few, many = batch_of([50] * 8, 100), batch_of([50] * 64, 100)
    free = make_planner(CROSSOVER)
    one_at_once = make_planner(CROSSOVER, max_num_seqs=MAX_NUM_SEQS | {4: 1})
    little_memory = make_planner(CROSSOVER, kv_tokens=MEMORY | {4: 100})
    for bound in (one_at_once, little_memory):
        assert bound.token_seconds(FOUR, few)[-1] > 2 * free.token_seconds(FOUR, few)[-1]
    # A layout has its own limit: 64 requests are 16 on each of 4 ranks.
    bound = make_planner(CROSSOVER, max_num_seqs=dict.fromkeys(MEMORY, 16))
    growing = make_planner(CROSSOVER, max_num_seqs={tp: 16 * tp for tp in MEMORY})
    for layout in LAYOUTS:
        alone = free.token_seconds(layout, many)
        assert (growing.token_seconds(layout, many) == alone).all()
        assert (bound.token_seconds(layout, many) > alone).any() == (layout.tp > 1)


def test_replicas_without_a_request_are_idle() -> None:
    def busy_seconds(*work: Any) -> Floats:
        return np.asarray(work[5] + 0.0 * work[1] + 0.0 * work[7])

    planner, ahead = make_planner(busy_seconds), batch_of([50] * 6, np.arange(1, 7))
    assert planner.token_seconds(ONE, ahead).tolist() == [1, 2, 3, 4, 4, 4]


COMPUTING = steps(dict.fromkeys(MEMORY, 0.0), prompt=1e-4)
"""1e-3 s per request, 1e-4 s per prompt token."""


def test_ends_at_random_leave_replicas_uneven() -> None:
    """What a live request has in its replica, against drawn ends of 8 replicas of 4 requests."""
    asked: list[Floats] = []

    def seconds(layout: Layout, batch: Any, *_: Any) -> Floats:
        asked.append(np.asarray(batch, float))
        return np.ones(np.shape(batch))

    eight = Layout(1, 8)
    ahead = batch_of([50] * 32, np.arange(10, 330, 10))
    planner = Planner([eight], seconds, lambda *_: _[2], max_num_seqs={1: 64}, kv_tokens={1: 10**6})
    planner.token_seconds(eight, ahead)
    rng = np.random.default_rng(0)
    replica = np.repeat(np.arange(8), 4)
    for live, batch in zip(ahead.live, asked[0], strict=True):
        if live == int(live):
            seen = [
                (np.bincount(rng.choice(replica, int(live), replace=False)) ** 2).sum() / live
                for _ in range(1000)
            ]
            assert batch == pytest.approx(np.mean(seen), rel=0.03)
    assert asked[0][0] == 1


def test_where_memory_is_short_tokens_are_computed_again() -> None:
    """As many as are generated: by simulation it is 0.75 to 0.95 of them."""
    ahead = batch_of([50] * 8, 100)
    free = make_planner(COMPUTING).token_seconds(TWO, ahead)
    short = make_planner(COMPUTING, kv_tokens=MEMORY | {2: 300})
    queued = make_planner(COMPUTING, max_num_seqs=MAX_NUM_SEQS | {2: 2})
    # A live request has 3 beside it while all 8 are live, then in proportion to the others. With
    # more than three live, replicas of 300 tokens have too little.
    beside = 3 * (ahead.live - 1) / 7
    more = short.token_seconds(TWO, ahead) - free
    too_many = (1 + beside) * ahead.context / ahead.live > 300
    expected = np.where(too_many, 1e-4 * ahead.live / 2, 0.0)
    assert 0 < np.count_nonzero(expected) < len(expected)
    assert more[expected == 0] == pytest.approx(0)
    # Computing takes as long in whatever order; where memory is short, some groups get less of it.
    assert more @ ahead.steps == pytest.approx(expected @ ahead.steps)
    assert queued.token_seconds(TWO, ahead) == pytest.approx(free), "nothing is lost"


def test_what_waits_for_memory_runs_with_the_contexts_of_all_that_is_left() -> None:
    """Lengths up to 640: in early groups contexts are short, but some requests are near an end."""
    asked: list[Floats] = []

    def seconds(layout: Layout, batch: Any, *_: Any) -> Floats:
        asked.append(np.asarray(batch, float))
        return np.ones(np.shape(batch))

    ahead, room = batch_of([50] * 64, np.arange(10, 650, 10)), 3000
    make_planner(seconds, kv_tokens=MEMORY | {4: room}).token_seconds(FOUR, ahead)
    short = ahead.context > room
    assert short.any() and not short.all()
    tokens, held = ahead.live * ahead.steps, ahead.context * ahead.steps
    running = room * tokens[short].sum() / held[short].sum()
    assert asked[0][short] == pytest.approx(np.minimum(running, ahead.live[short]))
    assert asked[0][~short] == pytest.approx(ahead.live[~short])


def test_memory_that_is_short_later_is_seen_now() -> None:
    """Eight requests of 50 tokens and, at the end, 450, where a replica holds 1,200: half fit."""
    ahead = batch_of([50] * 8, 400)
    short = make_planner(CROSSOVER, kv_tokens=MEMORY | {4: 1200})
    free = make_planner(CROSSOVER)
    more = short.token_seconds(FOUR, ahead) / free.token_seconds(FOUR, ahead)
    more = more[ahead.steps > 1e-6]
    assert (np.diff(more) <= 0).all() and more[0] > 1.5 and more[-1] == 1


def test_a_group_whose_ranks_hold_copies_is_entered_when_it_has_room() -> None:
    """As with latent attention: a replica of any tp holds as much, so four hold four times that."""
    always = steps({1: 0.030, 2: 0.020, 4: 0.010}, dict.fromkeys(MEMORY, 0.0), prompt=1e-4)
    copies = make_planner(always, kv_tokens=dict.fromkeys(MEMORY, 3000))
    many, few = batch_of([1000] * 8, 50), batch_of([1000] * 2, 50)
    assert plan_of(make_planner(always), ONE, many).best == FOUR
    assert plan_of(copies, ONE, many).best == ONE
    assert plan_of(copies, ONE, few).best == FOUR


def test_a_switch_computes_again_what_its_target_cannot_hold() -> None:
    ahead = batch_of([1000] * 8, 10)
    planner = make_planner(COMPUTING, 0.5, kv_tokens=MEMORY | {2: 3000, 4: 7000})
    plain = make_planner(COMPUTING, 0.5)
    held = ahead.context[-1]
    # Of what the source holds, and over the replicas of the target.
    lost = {(1, 2): held - 6000, (4, 2): 1000, (1, 4): held - 7000, (2, 1): 0, (4, 1): 0, (2, 4): 0}
    for source in LAYOUTS:
        more = plan_of(planner, source, ahead).cost, plan_of(plain, source, ahead).cost
        waiting = waits(source, float(planner.token_seconds(source, ahead)[-1]))
        for target in more[0]:
            again = 1e-4 * lost[source.tp, target.tp] / target.replicas
            assert more[1][target] == pytest.approx(0.5 + waits(source, 8e-3 / source.replicas))
            assert more[0][target] == pytest.approx(0.5 + waiting + again)


def test_prompts_are_computed_first_in_chunks_over_the_replicas() -> None:
    planner = make_planner(steps({1: 0.3, 2: 0.2, 4: 0.1}, prompt=1e-3), 0.05)
    ahead = batch_of([50] * 8, 100)
    plain = planner.layout_costs(ahead).seconds
    for tokens in (4096, 512):
        later = planner.layout_costs(ahead, prompts=tokens).seconds
        for layout, before, after in zip(LAYOUTS, plain, later, strict=True):
            assert after[:-1] == before[:-1], "the last group is the present one"
            share = tokens / layout.replicas
            work = max(1, share / 512) * {1: 0.3, 2: 0.2, 4: 0.1}[layout.tp] + share / 1e3
            assert after[-1] - before[-1] == pytest.approx(work)


def test_a_hope_is_about_one_layout() -> None:
    planner = make_planner(CROSSOVER, 0.01)
    ahead = batch_of([50] * 64, 100)
    plain = plan_of(planner, ONE, ahead)
    optimistic = planner.layout_costs(ahead).optimistic(FOUR, 2.0).plan(ONE)
    assert optimistic.no_switch == plain.no_switch
    assert optimistic.switch_now[FOUR] < plain.switch_now[FOUR]
    assert optimistic.layout_costs.step[FOUR] == pytest.approx(plain.layout_costs.step[FOUR] / 2)


# Draft lengths


def at_batch(plan: Plan, layout: Layout, batch: int) -> int:
    """The draft length that a plan has for a replica's step."""
    return next(k for first, last, k in plan.layout_costs.drafts[layout] if first <= batch <= last)


@settings(max_examples=60)
@given(
    work=st.tuples(tables, tables, st.floats(0, 0.02), st.floats(0, 0.05)),
    drafts=expectations(),
    count=st.integers(1, 8),
)
def test_each_batch_size_has_its_best_length(
    work: tuple[Table, Table, float, float], drafts: DraftYield, count: int
) -> None:
    """Up to eight requests are planned for by number; one group of four has them in one batch."""
    seconds = steps(*work)
    planner = make_planner(seconds, 0.1)
    ahead = batch_of([50] * count, np.arange(1, count + 1))
    plan = plan_of(planner, ONE, ahead, draft_yield=drafts)
    lengths = list(zip(drafts.lengths, drafts.tokens, drafts.drafts, strict=True))
    for batch in range(1, count + 1):
        per_token = {
            int(k): float(seconds(FOUR, batch, 0, 0, 0, 1, batch * proposed, k)) / tokens
            for k, tokens, proposed in lengths
        }
        best = pytest.approx(min(per_token.values()))
        assert planner.token_seconds(FOUR, ahead, drafts)[batch - 1] == best
        assert per_token[at_batch(plan, FOUR, batch)] == best


@settings(max_examples=60)
@given(
    contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=80),
    most=st.fixed_dictionaries({tp: st.integers(1, 300) for tp in MEMORY}),
    memory=st.fixed_dictionaries({tp: st.integers(10, 10**5) for tp in MEMORY}),
    drafts=st.one_of(st.just(PLAIN), expectations(), expectations((0, 3))),
)
def test_tables_name_a_length_for_every_batch_size(
    contexts: list[int], most: Table, memory: Table, drafts: DraftYield
) -> None:
    rng = np.random.default_rng(len(contexts))
    planner = make_planner(VERIFYING, max_num_seqs=most, kv_tokens=memory)
    ahead = batch_of(contexts, rng.integers(1, 2000, (len(contexts), 4)))
    for layout, table in planner.layout_costs(ahead, draft_yield=drafts).drafts.items():
        firsts, lasts, lengths = zip(*table, strict=True)
        assert firsts == (1, *(last + 1 for last in lasts[:-1])) and lasts[-1] == most[layout.tp]
        assert set(lengths) <= {*drafts.lengths}
        assert all(type(number) is int for entry in table for number in entry)


@settings(max_examples=60)
@given(
    remaining=remainders,
    work=st.tuples(tables, tables),
    drafts=expectations(),
    more=st.lists(st.floats(0, 2), min_size=5, max_size=5),
)
def test_more_acceptance_never_takes_longer_and_none_changes_nothing(
    remaining: Rows, work: tuple[Table, Table], drafts: DraftYield, more: list[float]
) -> None:
    """But for a switch, which waits for longer steps."""
    planner = make_planner(steps(*work, 1e-3, 1e-3), 0.1)
    ahead = batch_of([10] * len(remaining), remaining)
    tokens = drafts.tokens + np.array(more) * (drafts.lengths > 0)
    better = DraftYield(drafts.lengths, tokens, drafts.drafts)
    for layout in LAYOUTS:
        plain = plan_of(planner, layout, ahead)
        useless = plan_of(planner, layout, ahead, draft_yield=draft_yield([1.0] * 5))
        assert useless == plain, "to the last digit"
        assert all(table == ((1, 1024, 0),) for table in plain.layout_costs.drafts.values())
        less, least = (
            plan_of(planner, layout, ahead, draft_yield=accepted) for accepted in (drafts, better)
        )
        assert least.no_switch <= less.no_switch <= plain.no_switch
        now, then = (
            planner.token_seconds(layout, ahead, accepted) for accepted in (drafts, better)
        )
        assert (then <= now).all()


def test_a_switch_waits_for_steps_and_drops_drafts() -> None:
    """However many tokens the steps give."""
    planner = make_planner(CROSSOVER, 0.05)
    ahead = batch_of([50] * 2, 500)
    four = draft_yield([2.0], hits=0.75, lengths=(4,))
    plain, drafted = (plan_of(planner, ONE, ahead, draft_yield=drafts) for drafts in (PLAIN, four))
    assert drafted.no_switch == pytest.approx(plain.no_switch / 2)
    assert drafted.layout_costs.step == pytest.approx(plain.layout_costs.step)
    # The first step afterwards gives one token where two were expected.
    more = 0.5 * drafted.layout_costs.step[FOUR]
    assert drafted.cost[FOUR] == pytest.approx(plain.cost[FOUR] + more)

"""What a profile measures, in which order, and what a point may take."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.models.kinds import SlidingWindow, num_blocks
from pat_vllm.profile import StepSample, StepShape
from pat_vllm.profiling.grid import EngineLimits, Plan, StepPoint, SwitchPoint, estimate
from tests.support.kinds import full

ONE, TWO = Layout(1, 2), Layout(2, 1)
LIMITS = EngineLimits(
    layouts=(ONE, TWO),
    max_num_seqs={1: 64, 2: 128},
    max_batch_tokens={1: 512, 2: 1024},
    max_model_len=4096,
    kinds=full(8),
    blocks={1: 2000, 2: 4000},
    draft_lengths=(1, 2, 4, 7),
    misses=True,
)


@st.composite
def limits(draw: st.DrawFn) -> EngineLimits:
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    layouts = tuple(Layout.of(tp, ranks) for tp in (1, 2, 4, 8) if tp <= ranks)
    block_size = draw(st.sampled_from([16, 32, 128]))
    max_model_len = draw(st.integers(16, 40_000))
    # vLLM refuses to start when not even one longest context fits.
    kinds = full(8, block_size)
    if draw(st.booleans()):
        kinds += (SlidingWindow(8, block_size, window=draw(st.integers(1, 5000))),)
    blocks = num_blocks(kinds, max_model_len, max_model_len) + draw(st.integers(1, 5000))
    lengths = draw(st.sets(st.integers(1, 16), max_size=4))
    return EngineLimits(
        layouts=layouts,
        max_num_seqs={layout.tp: draw(st.integers(1, 512)) for layout in layouts},
        max_batch_tokens={layout.tp: draw(st.integers(16, 16_384)) for layout in layouts},
        max_model_len=max_model_len,
        kinds=kinds,
        blocks={layout.tp: blocks * layout.tp for layout in layouts},
        draft_lengths=tuple(sorted(lengths)),
        misses=draw(st.booleans()),
    )


def check_possible(limits: EngineLimits, point: StepPoint) -> None:
    """A replica can make such a step, as often as is needed to measure it."""
    tp = point.layout.tp
    assert 1 <= point.busy <= point.layout.replicas
    assert point.batch + point.prefill >= 1
    room = limits.room_for(point.drafts)
    prompts = limits.prompts(point.prefill)
    lengths = [*(c + room + 1 for c in point.contexts), *(p + 1 for p in prompts)]
    assert min(lengths) > 1 and max(lengths) <= limits.max_model_len
    assert len(lengths) <= limits.max_num_seqs[tp]
    assert point.batch * (1 + point.drafts) + point.prefill <= limits.max_batch_tokens[tp]
    first = [*(c - 1 for c in point.contexts), *(0 for _ in prompts)]
    blocks = [
        kind.held(length).stop - kind.held(computed).start
        for kind in limits.kinds
        for length, computed in zip(lengths, first, strict=True)
    ]
    assert sum(blocks) <= limits.blocks[tp]


@settings(max_examples=30)
@given(limits())
# Not even one request's drafts have room in a step.
@example(replace(LIMITS, max_batch_tokens={1: 16, 2: 32}, draft_lengths=(4, 16)))
def test_plans_are_possible_and_fair(limits: EngineLimits) -> None:
    plan = Plan.of(limits)
    assert len({*plan.points} - {*drafting(plan)}) <= 40 * len(limits.layouts)
    assert len(set(plan.points)) == len(plan.points)
    first = plan.points[: plan.essential]
    assert all(isinstance(point, StepPoint) and point.batch for point in first)
    in_first = {point.layout for point in first if isinstance(point, StepPoint)}
    assert in_first == {*limits.layouts}
    pairs = {(p.source, p.target) for p in plan.points if isinstance(p, SwitchPoint)}
    assert pairs == {*itertools.permutations(limits.layouts, 2)}
    for point in plan.points:
        if isinstance(point, StepPoint):
            check_possible(limits, point)
            assert limits.misses or point.hits or not point.k
        elif point.num_seqs:
            last = point.context - 1
            held = sum(k.held(last + 2).stop - k.held(last).start for k in limits.kinds)
            for end in (point.source, point.target):
                assert -(-point.num_seqs // end.replicas) * held <= limits.blocks[end.tp]


def drafting(plan: Plan) -> list[StepPoint]:
    return [point for point in plan.points if isinstance(point, StepPoint) and point.k]


def test_without_drafts_the_other_points_are_the_same() -> None:
    with_drafts = Plan.of(LIMITS)
    without = Plan.of(replace(LIMITS, draft_lengths=()))
    assert not drafting(without)
    drafted = {*drafting(with_drafts)}
    assert {*without.points} == {*with_drafts.points} - drafted
    first = with_drafts.points[: with_drafts.essential]
    assert without.points[: without.essential] == tuple(p for p in first if p not in drafted)


def test_no_layout_is_without_drafts_however_slow_the_machine() -> None:
    """Drafts would seem to cost nothing in it, and real steps could not tell."""
    plan = Plan.of(LIMITS)
    first = drafting(replace(plan, points=plan.points[: plan.essential]))
    assert {(p.layout, p.hits) for p in first} == {*itertools.product((ONE, TWO), (True, False))}


def test_points_with_drafts() -> None:
    """So many requests are measured without drafts, too, to compare with; and all are early."""
    plan = Plan.of(LIMITS)
    drafted = {(p.layout, p.batch) for p in drafting(plan)}
    plain = {(p.layout, p.batch) for p in plan.points if isinstance(p, StepPoint) and not p.k}
    assert drafted <= plain and {(ONE, 1), (ONE, 64), (TWO, 1), (TWO, 128)} <= drafted
    assert plan.points.index(drafting(plan)[-1]) <= len(plan.points) / 2
    assert {p.k for p in drafting(plan)} == {2, 7}, "the longest, and what tells of the others"


def test_a_drafter_with_weights_is_measured_at_long_contexts_too() -> None:
    plan = Plan.of(replace(LIMITS, misses=False, drafter_has_weights=True))
    long = [point for point in drafting(plan) if point.context > 2 * LIMITS.short]
    assert {point.layout for point in long} == {ONE, TWO}
    assert not [point for point in drafting(Plan.of(LIMITS)) if point.context > 2 * LIMITS.short]


def test_a_longer_budget_has_the_same_points_and_more_patience() -> None:
    start, longer = Plan.of(LIMITS), Plan.of(LIMITS, budget=200.0)
    assert longer.points == start.points
    assert (start.budget, start.overtime) == (20.0, 40.0)
    assert (longer.budget, longer.overtime) == (200.0, 0.0)
    assert longer.patience == pytest.approx(10 * start.patience)


def sample(seconds: float, batch: int, context: int, prefill: int = 0, k: int = 0) -> StepSample:
    shape = StepShape(batch, context, context, prefill, k=k)
    return StepSample.of(ONE, shape, [seconds])


KNOWN = [sample(0.1, 8, 64), sample(0.3, 0, 0, prefill=100)]


@pytest.mark.parametrize(
    ("point", "seconds"),
    [
        # Twice the batch may take twice the time; half of it may take as long.
        (StepPoint(ONE, 16, 8, 2), 0.2),
        (StepPoint(ONE, 4, 8, 2), 0.1),
        # So may four times the contexts, beyond a quarter.
        (StepPoint(ONE, 8, 64, 2), 0.2),
        # Nothing is known of this layout.
        (StepPoint(TWO, 8, 8, 1), 0.1),
        (StepPoint(ONE, 0, 0, 2, prefill=200), 0.6),
        # Drafts are tokens.
        (StepPoint(ONE, 8, 8, 2, k=4, hits=True), 0.5),
        (StepPoint(ONE, 8, 8, 2, k=4), 0.1),
    ],
)
def test_estimates_do_not_promise_too_much(point: StepPoint, seconds: float) -> None:
    assert estimate(point, KNOWN) == pytest.approx(seconds)
    if not point.k:
        # What a step with drafts takes says little of one without.
        assert estimate(point, [*KNOWN, sample(1e-3, 8, 64, k=4)]) == pytest.approx(seconds)

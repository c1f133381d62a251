"""Whole batches, planned before they begin: where all run at once, and where requests wait."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import GPUS
from pat_vllm.modelled.roofline import Machine
from pat_vllm.modelled.shapes import SHAPES, drawn_lengths
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.predictor.planner import Planner
from pat_vllm.predictor.whole_batch import (
    Batch,
    StaticEngines,
    acceptance_of_each,
    best_plan,
    plan_batch,
    serve_in_order,
)

MACHINE = Machine(ModelSize.of(MODEL_SHAPES["llama-3.1-8b"]), GPUS["H100"])
NARROW, WIDE = Layout(1, 8), Layout(8, 1)
MUCH = 10**9


def batch(lengths: Any, prompt: int = 100, acceptance: float | None = None) -> Batch:
    lengths = np.array(lengths, np.int64)
    each = None if acceptance is None else acceptance_of_each(acceptance, len(lengths), 0)
    return Batch(np.full(len(lengths), prompt), lengths, each)


def planner(*layouts: Layout, room: int = MUCH, most: int = 1024) -> Planner:
    sizes = {layout.tp: 0 for layout in layouts}
    return Planner(
        layouts,
        MACHINE.step,
        MACHINE.switch(layouts[0]),
        max_num_seqs=dict.fromkeys(sizes, most),
        kv_tokens=dict.fromkeys(sizes, room),
    )


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.integers(500, 4000),
    st.integers(1, 40),
)
def test_what_is_served_in_order(lengths: list[int], room: int, most: int) -> None:
    """No token is made twice or left out, nothing runs that has no room, and who is left has."""
    asked = batch(lengths)
    waits = serve_in_order(asked, room, most)
    made = float(waits.running @ waits.tokens)
    left = asked.lengths[waits.left] - waits.num_output_tokens
    assert (left >= 1).all() and len(left) <= most
    assert sum(lengths) - left.sum() <= made + 1
    assert (waits.running <= most).all() and (waits.running >= 1).all()
    fits = (waits.context <= room) | (waits.running == 1)
    assert fits.all()
    order = np.sort(left)[::-1]
    held = np.sort(100 + waits.num_output_tokens)
    assert not len(left) or held.sum() + order[-1] * len(left) <= room + held.max() + order.max()
    assert waits.computed >= 100 * len(lengths)
    if sum(lengths) + 100 * len(lengths) <= room and len(lengths) <= most:
        assert not len(waits.running) and len(waits.left) == len(lengths)


def test_a_batch_that_fits_is_the_planners_alone() -> None:
    plan = plan_batch(planner(NARROW, WIDE), NARROW, batch([400] * 63 + [8000]))
    prompts = planner(NARROW).prefill_seconds(NARROW, 6400, 8192)
    assert plan.waiting == pytest.approx(prompts)
    assert plan.planned < plan.static
    assert plan.path[0] == (NARROW, 64) and plan.path[-1][0] == WIDE
    assert [live for _, live in plan.path] == sorted((n for _, n in plan.path), reverse=True)


def test_an_engine_begins_where_its_plan_is_best() -> None:
    asked = batch([400] * 1023 + [8000])
    alone = [plan_batch(planner(layout), layout, asked).static for layout in (NARROW, WIDE)]
    assert best_plan(planner(NARROW, WIDE), asked).planned < min(alone)


def test_less_room_takes_longer() -> None:
    asked = batch(drawn_lengths("deepscaler", 256, 4096, 0))
    seconds = [
        plan_batch(planner(WIDE, room=room), WIDE, asked).static
        for room in (MUCH, 200_000, 100_000, 50_000)
    ]
    assert seconds == sorted(seconds) and seconds[-1] > 1.5 * seconds[0]
    few = plan_batch(planner(WIDE, most=32), WIDE, asked).static
    assert few > seconds[0]


def test_equal_requests_that_wait_take_turns() -> None:
    """Four times as many as may run take four times as long, but for their prompts."""
    once, four = (
        plan_batch(planner(WIDE, most=16), WIDE, batch([1000] * count, prompt=1)).static
        for count in (16, 64)
    )
    assert four == pytest.approx(4 * once, rel=0.05)


def test_static_engines_end_with_the_last_of_them() -> None:
    static = StaticEngines(NARROW, MACHINE.step, 1024, MUCH)
    long = batch([4000])
    lengths = np.full(64, 10)
    lengths[13] = 4000
    assert static.seconds(batch(lengths)) == pytest.approx(static.seconds(long), rel=0.05)
    group = StaticEngines(WIDE, MACHINE.step, 1024, MUCH)
    asked = batch(lengths)
    assert group.seconds(asked) == plan_batch(planner(WIDE), WIDE, asked).static


def test_draft_lengths_of_static_engines() -> None:
    """A table beats or equals each fixed length, and drafts less for more requests."""
    static = StaticEngines(WIDE, MACHINE.step, 1024, MUCH)
    asked = batch(drawn_lengths("log-normal", 512, 4096, 0), acceptance=0.6)
    lengths = (0, 1, 2, 4, 7)
    table = static.tuned_schedule(asked, lengths)
    assert table[0][0] == 1 and table[-1][1] == 1024
    assert all(a[1] + 1 == b[0] for a, b in pairwise(table))
    assert [k for *_, k in table] == sorted((k for *_, k in table), reverse=True)
    assert table[0][2] > table[-1][2]
    fixed = [static.seconds(asked, ((1, 1024, k),)) for k in lengths]
    assert static.seconds(asked, table) < 1.02 * min(fixed)
    never = replace(asked, acceptance=np.zeros(512))
    assert {k for *_, k in static.tuned_schedule(never, lengths)} == {0}
    planned = best_plan(planner(WIDE), asked, lengths).planned
    assert planned <= static.seconds(asked, table) * (1 + 1e-9)


def test_acceptance_of_requests_that_are_unlike() -> None:
    each = acceptance_of_each(0.5, 10_000, 1)
    assert each.mean() == pytest.approx(0.5, abs=0.01) and 0.05 < each.std() < 0.2
    assert (acceptance_of_each(1.0, 3, 0) == 1).all()
    tokens = batch([5, 5], acceptance=1.0).tokens_per_step(np.array([0, 1, 4]))
    assert tokens.tolist() == [[1, 1], [2, 2], [5, 5]]


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_within_bounds(shape: str) -> None:
    lengths = drawn_lengths(shape, 515, 2048, 3)
    assert len(lengths) == 515 and lengths.min() >= 1 and lengths.max() <= 2048
    assert (drawn_lengths(shape, 515, 2048, 3) == lengths).all()
    if shape == "straggler":
        assert sorted(lengths)[-2] < 140 and lengths.max() == 2048

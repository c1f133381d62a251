"""Modelled mixtures: which experts a step reads, and what that makes of steps and switches."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.modelled.expert_load import ExpertLoad, busiest, hot_experts
from pat_vllm.modelled.gpus import GPUS
from pat_vllm.modelled.roofline import Machine
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.layer_sizes import ExpertSizes
from pat_vllm.models.model_size import ModelSize
from tests.support.held_out import held_out_error
from tests.support.modelled_profile import modelled_profile

CUT = Machine(ModelSize.of(MODEL_SHAPES["qwen3-30b-a3b"]), GPUS["H200"])
SPREAD = replace(CUT, experts="ep")
EIGHT = [Layout.of(tp, 8) for tp in (1, 2, 4, 8)]


def experts_of(count: int, per_token: int) -> ExpertSizes:
    return ExpertSizes(count, per_token, intermediate=1, shared=0, shared_gate=False, layers=1)


mixtures = st.builds(
    lambda count, share: experts_of(count, max(1, round(count * share))),
    st.integers(1, 64),
    st.floats(0, 1),
)


# -------------------------------------------------------------------- which experts


def hot_at(experts: ExpertSizes, tokens: int) -> float:
    return float(hot_experts(experts, np.array([float(tokens)]))[0])


@settings(max_examples=50)
@given(mixtures, st.integers(0, 5000), st.integers(0, 500))
def test_hot_experts(experts: ExpertSizes, tokens: int, more: int) -> None:
    """More tokens make no fewer experts hot."""
    hot = hot_at(experts, tokens)
    assert 0 <= hot <= hot_at(experts, tokens + more) + 1e-9 <= experts.count + 2e-9
    assert hot <= tokens * experts.per_token + 1e-9
    assert hot_at(experts, 1) == pytest.approx(experts.per_token)


@settings(max_examples=50)
@given(mixtures, st.sampled_from([1, 2, 3, 8]), st.integers(1, 3000), st.integers(0, 500))
def test_busiest_rank(experts: ExpertSizes, ranks: int, tokens: int, more: int) -> None:
    if ranks > experts.count:
        return
    load, grown = (busiest(experts, num_tokens, ranks) for num_tokens in (tokens, tokens + more))
    most = -(-experts.count // ranks)
    assert load.hot <= grown.hot <= most and load.work <= grown.work + 1e-6
    assert load.work >= tokens * experts.per_token / ranks - 1e-6, "less than the mean"
    assert load.work <= tokens * experts.per_token
    # The 64 drawn layers have some more or fewer than the mean: four standard deviations.
    hot = hot_at(experts, tokens)
    assert load.hot >= (hot - 4 * (hot / 64) ** 0.5) / ranks
    if ranks == 1:
        assert load.work == pytest.approx(tokens * experts.per_token)


def counted(experts: ExpertSizes, tokens: int, ranks: int, draws: int = 400) -> ExpertLoad:
    """By drawing every token's experts."""
    random = np.random.default_rng(1)
    hot = work = 0.0
    for _ in range(draws):
        keys = random.random((tokens, experts.count))
        chosen = np.argpartition(-keys, experts.per_token - 1)[:, : experts.per_token]
        of_expert = np.bincount(chosen.ravel(), minlength=experts.count)
        of_rank = of_expert.reshape(ranks, -1)
        hot += float((of_rank > 0).sum(1).max()) / draws
        work += float(of_rank.sum(1).max()) / draws
    return ExpertLoad(hot, work)


@pytest.mark.parametrize(("tokens", "ranks"), [(2, 4), (16, 8), (128, 4)])
def test_loads_are_those_of_tokens_that_choose(tokens: int, ranks: int) -> None:
    experts = experts_of(64, 4)
    load, expected = busiest(experts, tokens, ranks), counted(experts, tokens, ranks)
    assert load.hot == pytest.approx(expected.hot, rel=0.07)
    # Of few tokens, which are no work, it says somewhat too little.
    assert load.work == pytest.approx(expected.work, rel=0.06 if tokens > 2 else 0.12)


# -------------------------------------------------------------------- steps


@settings(max_examples=50)
@given(
    st.sampled_from([CUT, SPREAD]),
    st.sampled_from(EIGHT),
    st.integers(1, 2000),
    st.integers(0, 300),
)
def test_steps_take_longer_with_more_tokens(
    machine: Machine, layout: Layout, batch: int, more: int
) -> None:
    once = machine.step(layout, batch, 1000 * batch)
    assert once <= machine.step(layout, batch + more, 1000 * (batch + more)) + 1e-12
    assert once <= machine.step(layout, batch, 1000 * batch, prefill=more) + 1e-12
    assert once <= machine.step(layout, batch, 1000 * batch, drafts=more) + 1e-12


def test_spread_experts_wait_for_the_busiest_rank() -> None:
    for layout, batch in product(EIGHT, (1, 8, 256)):
        cut, spread = (each.step(layout, batch, 500 * batch) for each in (CUT, SPREAD))
        assert cut == spread if layout.tp == 1 else cut <= spread


# -------------------------------------------------------------------- profiles


def test_layouts_without_memory_for_all_experts() -> None:
    profile = modelled_profile("qwen3-30b-a3b", "A40", 8)
    assert [str(layout) for layout in profile.layouts] == ["tp2dp4", "tp4dp2", "tp8dp1"]
    spread = modelled_profile("qwen3-30b-a3b", "A40", 8, experts="ep")
    assert spread.layouts == profile.layouts
    assert (profile.key["experts"], spread.key["experts"]) == ("tp", "ep")


def test_switches_move_the_rows_of_cut_experts_only() -> None:
    rows = 768 * 2048 * 128 * 48
    base = EIGHT[0]
    for source, target in product(EIGHT, EIGHT):
        assert SPREAD.moved_experts(source, target, base) == 0
        moved = CUT.moved_experts(source, target, base)
        assert moved == CUT.moved_experts(target, source, base)
        cut = [end.tp for end in (source, target) if end.tp > 1]
        assert moved == pytest.approx(sum(2 * rows / tp for tp in cut))
    # 19.3 GB to two ranks: read, and written.
    assert 2 * CUT.moved_experts(base, EIGHT[1], base) == pytest.approx(19.3e9, rel=0.01)
    at_half = CUT.moved_experts(EIGHT[1], EIGHT[3], EIGHT[1])
    assert at_half == pytest.approx(2 * rows / 8), "nothing has to be undone"


def test_steps_are_predicted_because_the_base_knows_hot_experts() -> None:
    profile = modelled_profile("qwen3-30b-a3b", "H200", 4)
    blind = profile.model_copy(update={"experts": None})
    known, unknown = (held_out_error(each) for each in (profile, blind))
    for layout, errors in known.items():
        assert errors.mean() < 0.015 and errors.mean() < 0.5 * unknown[layout].mean()

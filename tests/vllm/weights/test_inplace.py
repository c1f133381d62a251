"""Shards in one storage equal, bit for bit, what vLLM loads, and the way back restores it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from pat_vllm.layout import Experts, Layout
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.model_weights import model_weights
from tests.vllm.weights.test_weights import (
    CASES,
    Case,
    assert_same_weights,
    embedding_and_head,
    shared,
    storages,
)

ONE, TWO, FOUR = (Layout.of(tp, 4) for tp in (1, 2, 4))


def addresses(model: nn.Module) -> list[int]:
    return [weight.current.data_ptr() for weight in model_weights(model)]


def check_walk(
    base: nn.Module,
    wider: Mapping[Layout, nn.Module],
    expected: Mapping[Layout, nn.Module],
    rank: int,
    rng: random.Random,
    experts: Experts = "tp",
) -> None:
    """A random walk over layouts that share one storage, the base layout first; the way back."""
    layouts = list(expected)
    strategy = shared(base, wider.values(), layouts, rank, experts)
    models = {layouts[0]: base, **wider}
    places = {layout: addresses(model) for layout, model in models.items()}
    for layout in [*layouts, *rng.choices(layouts, k=12), layouts[0]]:
        strategy.arrange(layout)
        assert_same_weights(models[layout], expected[layout])
    for layout, model in models.items():
        assert storages(model) == storages(base), "a layout has memory of its own"
        assert addresses(model) == places[layout], "compiled code would miss them"


GATE_UP = next(case for case in CASES if case.name == "gate_up")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_shard_is_what_vllm_loads(case: Case) -> None:
    """On a random walk over the layouts, for each rank of an engine and each base layout."""
    rng = random.Random(case.name)
    world_size = math.lcm(*case.tps)
    for base_tp, rank in product(case.tps, range(world_size)):
        layouts = [Layout.of(tp, world_size) for tp in case.tps if tp % base_tp == 0]
        ranks = {layout: layout.tp_rank_of(rank) for layout in layouts}
        base = case.load(base_tp, ranks[layouts[0]])
        expected = {layout: case.load(layout.tp, at) for layout, at in ranks.items()}
        models = {layout: case.empty(layout.tp, ranks[layout]) for layout in layouts[1:]}
        check_walk(base, models, expected, rank, rng)


def test_an_update_may_put_a_new_tensor_in_a_parameters_place() -> None:
    base, model = GATE_UP.load(1, 0), GATE_UP.empty(4, 2)
    strategy = shared(base, [model], [ONE, FOUR], rank=2)
    strategy.arrange(FOUR)
    strategy.arrange(ONE)
    layer: Any = base["layer"]
    layer.weight.data = layer.weight.data * 2
    strategy.refresh(base, [model])
    assert storages(base) == storages(model)
    strategy.arrange(FOUR)
    expected: Any = GATE_UP.load(4, 2)
    expected["layer"].weight.data *= 2
    assert_same_weights(model, expected)


def test_tied_weights_stay_tied_and_move_once() -> None:
    for rank in range(4):
        base, model = embedding_and_head(1, 0, tie=True), embedding_and_head(4, rank, tie=True)
        strategy = shared(base, [model], [ONE, FOUR], rank)
        strategy.arrange(FOUR)
        assert_same_weights(model, embedding_and_head(4, rank, tie=True))


def test_packed_weights_are_refused() -> None:
    base, model = GATE_UP.load(1, 0), GATE_UP.empty(2, 0)
    strategy = InPlaceShards([ONE, TWO], rank=0)
    strategy.capture(base)
    strategy.fill(model)
    base["layer"].weight = nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(ValueError, match=r"layer\.weight .*'materialized'"):
        strategy.release()

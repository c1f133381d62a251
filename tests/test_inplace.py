"""Shards in one storage equal, bit for bit, what vLLM loads, and the way back restores it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear

from pat_vllm.layout import Layout
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.model_weights import model_weights
from tests.models import random_model
from tests.test_weights import (
    CASES,
    HIDDEN,
    Case,
    as_rank,
    assert_same_weights,
    build,
    embedding_and_head,
    load,
    scaled,
    values,
    vllm_config_for,
)


@pytest.fixture(autouse=True)
def current_vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


ONE, TWO, FOUR = (Layout.of(tp, 4) for tp in (1, 2, 4))


def shared(
    base: nn.Module, models: Iterable[nn.Module], layouts: Sequence[Layout], rank: int
) -> InPlaceShards:
    """The strategy, with the models of other layouts than the first filled."""
    strategy = InPlaceShards(layouts, rank)
    strategy.check(base)
    strategy.capture(base)
    for model in models:
        strategy.fill(model)
    strategy.release()
    return strategy


def storages(model: nn.Module) -> set[int]:
    return {weight.current.untyped_storage()._cdata for weight in model_weights(model)}


def addresses(model: nn.Module) -> list[int]:
    return [weight.current.data_ptr() for weight in model_weights(model)]


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
        models = {one: case.empty(one.tp, ranks[one]) for one in layouts[1:]}
        strategy = shared(base, models.values(), layouts, rank)
        models[layouts[0]] = base
        places = {layout: addresses(model) for layout, model in models.items()}
        for layout in [*layouts, *rng.choices(layouts, k=10), layouts[0]]:
            strategy.arrange(layout)
            assert_same_weights(models[layout], expected[layout])
        for layout, model in models.items():
            assert storages(model) == storages(base), "a layout has memory of its own"
            assert addresses(model) == places[layout], "compiled code would miss them"


def test_new_weights_reach_every_layout() -> None:
    case = next(case for case in CASES if case.name == "gate_up")
    base, model = case.load(1, 0), case.empty(4, 2)
    strategy = shared(base, [model], [ONE, FOUR], rank=2)
    strategy.arrange(FOUR)
    strategy.arrange(ONE)
    scaled(base, 3)
    strategy.refresh(base, [model])
    strategy.arrange(FOUR)
    assert_same_weights(model, scaled(case.load(4, 2), 3))

    # An update that puts a new tensor in the parameter's place.
    strategy.arrange(ONE)
    base["layer"].weight.data = base["layer"].weight.data * 2
    strategy.refresh(base, [model])
    scaled(nn.ModuleDict({"layer": base["layer"]}), 1)
    strategy.arrange(FOUR)
    expected = scaled(case.load(4, 2), 3)
    expected["layer"].weight.data *= 2
    assert_same_weights(model, expected)


@pytest.mark.parametrize("tie", [True, False])
def test_tied_weights_stay_tied_and_move_once(tie: bool) -> None:
    for rank in range(4):
        base, model = embedding_and_head(1, 0, tie), embedding_and_head(4, rank, tie)
        strategy = shared(base, [model], [ONE, FOUR], rank)
        strategy.arrange(FOUR)
        assert_same_weights(model, embedding_and_head(4, rank, tie))


def test_building_leaves_no_memory_behind() -> None:
    strategy = InPlaceShards([ONE, TWO], rank=2)
    with strategy.building(), as_rank(2, 1):
        model = nn.ModuleDict({"mlp": ColumnParallelLinear(HIDDEN, 8, bias=True)})
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    with as_rank(2, 1):
        after = nn.ModuleDict({"mlp": ColumnParallelLinear(HIDDEN, 8)})
    assert after["mlp"].weight.untyped_storage().nbytes() > 0


def test_packed_weights_are_refused() -> None:
    case = next(case for case in CASES if case.name == "column")
    base, model = case.load(1, 0), case.empty(2, 0)
    strategy = InPlaceShards([ONE, TWO], rank=0)
    strategy.capture(base)
    strategy.fill(model)
    base["layer"].weight = nn.Parameter(torch.empty(0), requires_grad=False)
    with pytest.raises(ValueError, match=r"layer\.weight .*'materialized'"):
        strategy.release()


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_few_kv", "qwen3_tied"])
def test_whole_model(name: str) -> None:
    vllm_config = vllm_config_for(random_model(name), tp=1)
    user = vllm_config.load_config
    expected = {}
    for tp in (1, 2, 4):
        expected[tp] = load(build(vllm_config, tp, tp - 1), vllm_config, user)
    base = load(build(vllm_config, 1, 0), vllm_config, user)
    before = values(base)
    strategy = InPlaceShards([ONE, TWO, FOUR], rank=3)
    models = {}
    for tp, rank in {2: 1, 4: 3}.items():
        with strategy.building():
            models[tp] = build(vllm_config, tp, rank)
    strategy.capture(base)
    for model in models.values():
        strategy.fill(model)
    strategy.release()
    models[1] = base
    for tp in (2, 4, 2, 1, 4, 1):
        strategy.arrange(Layout.of(tp, 4))
        assert_same_weights(models[tp], expected[tp])
    for weight, tensor in values(base).items():
        assert torch.equal(tensor, before[weight]), weight

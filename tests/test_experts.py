"""Experts, cut and spread: bit for bit what vLLM loads at that tp, in one storage or copies."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import ParallelConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import layer as vllm_layer
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform

from pat_vllm.kernels import swap
from pat_vllm.layout import Experts, Layout, Place
from pat_vllm.patches.weights import keep_plain_weights
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.weights.model_weights import model_weights
from pat_vllm.weights.shards import ExpertPartition
from tests.models import random_model
from tests.support.mutation import mutated
from tests.test_inplace import addresses, shared, storages
from tests.test_weights import (
    as_rank,
    assert_same_weights,
    derive,
    load,
    scaled,
    values,
    vllm_config_for,
)

RANKS = 4
HIDDEN, INTERMEDIATE = 32, 64
KINDS: tuple[Experts, ...] = ("tp", "ep")
ONE = Layout.of(1, RANKS)
WIDER = [Layout.of(tp, RANKS, kind) for tp in (2, 4) for kind in KINDS]
LAYOUTS = [ONE, *WIDER]
MODELS = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe"]


@pytest.fixture(autouse=True)
def current_vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


@contextmanager
def in_place(place: Place, parallel: ParallelConfig) -> Iterator[None]:
    """Inside, vLLM builds layers for that place."""
    group = SimpleNamespace(device_group=SimpleNamespace(size=lambda: place.tp))
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    with pytest.MonkeyPatch.context() as patch, as_rank(place.tp, place.tp_rank):
        for name, value in {"_EP": group, "_DP": alone, "_PCP": alone}.items():
            patch.setattr(parallel_state, name, value)
        patch.setattr(parallel, "enable_expert_parallel", place.experts == "ep")
        yield


# ------------------------------------------------------------------------------ one layer


def empty(place: Place, experts: int = 8, **options: Any) -> nn.Module:
    """A layer of experts as vLLM builds it there, in a model."""
    config = get_current_vllm_config()
    config.compilation_config.static_forward_context.clear()
    with in_place(place, config.parallel_config):
        runner = vllm_layer.FusedMoEFactory(
            num_experts=experts,
            top_k=2,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            prefix="model.experts",
            **options,
        )
    return nn.ModuleDict({"experts": runner})


def loaded(place: Place, experts: int = 8, fused: bool = False) -> nn.Module:
    """The layer as vLLM loads it there; the same checkpoint every time."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / 8

    gate_up, down = drawn(experts, 2 * INTERMEDIATE, HIDDEN), drawn(experts, HIDDEN, INTERMEDIATE)
    checkpoint = {"gate_up_proj": gate_up, "down_proj": down}
    if not fused:
        gate, up = gate_up.chunk(2, dim=1)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        checkpoint = {
            f"{i}.{name}.weight": part[i] for name, part in parts.items() for i in range(experts)
        }
    model = empty(place, experts)
    named = list(model["experts"].load_weights(checkpoint.items()))
    assert named, "vLLM has loaded nothing"
    return model


def routed(model: nn.Module) -> RoutedExperts:
    experts = model["experts"].routed_experts
    assert isinstance(experts, RoutedExperts)
    return experts


@pytest.mark.parametrize("experts", [8, 6, 5])
@pytest.mark.parametrize("tp", [2, 4])
def test_spread_experts_lie_where_vllm_maps_them(tp: int, experts: int) -> None:
    for tp_rank in range(tp):
        count, placed, _ = determine_expert_map(tp, tp_rank, experts)
        (piece,) = ExpertPartition(experts).shard(tp, tp_rank).pieces
        assert placed is not None
        assert count == piece.length
        own = [expert for expert, at in enumerate(placed.tolist()) if at >= 0]
        assert own == list(range(piece.src, piece.src + piece.length))
        assert placed[own].tolist() == list(range(count))


def check_walks(experts: int, layouts: Sequence[Layout], rank: int) -> None:
    """A random walk over layouts that share one storage; then the way back."""
    rng = random.Random(f"{experts} {rank}")
    base, expected = (
        {one: loaded(one.place_of(rank), experts) for one in some}
        for some in (layouts[:1], layouts)
    )
    models = base | {one: empty(one.place_of(rank), experts) for one in layouts[1:]}
    before = values(models[layouts[0]])
    strategy = shared(models[layouts[0]], list(models.values())[1:], layouts, rank)
    found = {one: addresses(model) for one, model in models.items()}
    for layout in [*layouts, *rng.choices(layouts, k=20), layouts[0]]:
        strategy.arrange(layout)
        assert_same_weights(models[layout], expected[layout])
    for layout, model in models.items():
        assert storages(model) == storages(models[layouts[0]]), "a layout has memory of its own"
        assert addresses(model) == found[layout], "compiled code would miss them"
        assert all(weight.current.stride(-1) == 1 for weight in model_weights(model))
    for name, tensor in values(models[layouts[0]]).items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("experts", [8, 6, 5])
def test_layouts_of_both_kinds_in_one_storage(experts: int) -> None:
    for rank in range(RANKS):
        check_walks(experts, LAYOUTS, rank)


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_layout_of_two_ranks(kind: Experts) -> None:
    for rank in range(RANKS):
        check_walks(8, [Layout.of(tp, RANKS, kind) for tp in (2, 4)], rank)


def test_rows_of_the_first_expert_only_are_noticed() -> None:
    change = {"(tensor.shape[:dim]), -1)": "(tensor.shape[:dim]), -1)[:1]"}
    with mutated(swap._sides, change), pytest.raises(AssertionError, match="w13_weight"):
        check_walks(8, LAYOUTS, rank=1)


def test_only_cut_experts_move() -> None:
    strategy = shared(
        loaded(ONE.place_of(3)), [empty(one.place_of(3)) for one in WIDER], LAYOUTS, rank=3
    )
    for layout in (one for one in WIDER if one.experts == "ep"):
        assert strategy.arrange(layout) == 0
    # At tp=2 half of the up rows of each expert trade places with as many others.
    assert strategy.arrange(WIDER[0]) == 8 * INTERMEDIATE * HIDDEN * 4


@pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])
@pytest.mark.parametrize("experts", [8, 5])
def test_copies_are_what_vllm_loads(experts: int, fused: bool) -> None:
    for layout in WIDER:
        for rank in range(RANKS):
            model = empty(layout.place_of(rank), experts)
            derive(loaded(ONE.place_of(rank), experts, fused), model)
            assert_same_weights(model, loaded(layout.place_of(rank), experts))


def test_new_weights_reach_every_layout() -> None:
    rank = 2
    base = loaded(ONE.place_of(rank))
    models = [empty(one.place_of(rank)) for one in WIDER]
    strategy = shared(base, models, LAYOUTS, rank)
    strategy.arrange(WIDER[0])
    strategy.arrange(ONE)
    scaled(base, 3)
    strategy.refresh(base, models)
    for layout, model in zip(WIDER, models, strict=True):
        strategy.arrange(layout)
        assert_same_weights(model, scaled(loaded(layout.place_of(rank)), 3))


# ------------------------------------------------------------------------------ what runs them


def outputs(model: nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
    experts = routed(model)
    return experts.quant_method.apply(experts, x, weights, ids, None, None)


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, and the weights and ids of two experts for each."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand((20, 8), generator=generator)
    weights, ids = scores.topk(2)
    return torch.randn((20, HIDDEN), generator=generator), weights, ids.to(torch.int32)


def test_views_run_as_vllms_own_experts() -> None:
    """The ranks' outputs add up to what vLLM's packed experts give for all of them."""
    stock = loaded(ONE.place_of(0))
    routed(stock).quant_method.process_weights_after_loading(routed(stock))
    expected = outputs(stock, *tokens())
    for layout in WIDER:
        total = torch.zeros_like(expected)
        for rank in layout.ranks_of(0):
            model = empty(layout.place_of(rank))
            strategy = shared(loaded(ONE.place_of(rank)), [model], [ONE, layout], rank)
            strategy.arrange(layout)
            total += outputs(model, *tokens())
        torch.testing.assert_close(total, expected)


def test_on_a_gpu_vllm_makes_no_copy_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its method for experts looks at no platform where weights need no packing but CPU's."""
    base = loaded(ONE.place_of(1))
    models = [empty(one.place_of(1)) for one in WIDER]
    strategy = InPlaceShards(LAYOUTS, rank=1)
    with monkeypatch.context() as patch:
        patch.setattr(current_platform, "is_cpu", lambda: False)
        strategy.capture(base)
        for model in models:
            strategy.fill(model)
    for model in (base, *models):
        method, found = routed(model).quant_method, addresses_of_parameters(model)
        method.process_weights_after_loading(routed(model))
        kernel = method.moe_kernel
        assert kernel is not None
        method.process_weights_after_loading(routed(model))  # as after an update
        assert method.moe_kernel is kernel
        assert addresses_of_parameters(model) == found


def addresses_of_parameters(model: nn.Module) -> list[int]:
    """Also where vLLM's packed experts are refused."""
    return [parameter.data_ptr() for parameter in model.parameters()]


def test_copies_of_views_are_noticed() -> None:
    model = empty(WIDER[0].place_of(1))
    strategy = InPlaceShards(LAYOUTS[:2], rank=1)
    strategy.capture(loaded(ONE.place_of(1)))
    strategy.fill(model)
    routed(model).w13_weight.data = routed(model).w13_weight.data.contiguous()
    with pytest.raises(ValueError, match=r"packed experts\.routed_experts\.w13_weight"):
        strategy.release()


def test_packed_experts_are_known_although_they_look_like_plain_ones() -> None:
    model = loaded(ONE.place_of(0))
    before = values(model)
    MaterializedShards().check(model)
    routed(model).quant_method.process_weights_after_loading(routed(model))
    for name, tensor in before.items():
        assert model.get_parameter(name).shape == tensor.shape, "packing shows by itself now"
    with pytest.raises(ValueError, match="vLLM has packed"):
        MaterializedShards().check(model)
    model = loaded(ONE.place_of(0))
    keep_plain_weights(model)
    routed(model).quant_method.process_weights_after_loading(routed(model))
    MaterializedShards().check(model)
    assert_same_weights(model, loaded(ONE.place_of(0)))


# ------------------------------------------------------------------------------ refusals


class OwnLoader(RoutedExperts):
    def weight_loader(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_a_subclass_with_its_own_loader_is_unknown() -> None:
    model = empty(ONE.place_of(0), routed_experts_cls=OwnLoader)
    with pytest.raises(ValueError, match=r"experts\.routed_experts \(OwnLoader\)"):
        MaterializedShards().check(model)


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        ("method", {"unquantized_backend": UnquantizedMoeBackend.FLASHINFER_TRTLLM}, "TRTLLM"),
        ("method", {"unquantized_backend": UnquantizedMoeBackend.AITER}, "moe_backend='triton'"),
        ("parallel", {"enable_eplb": True}, "enable_eplb=False"),
        ("config", {"num_logical_experts": 6}, "enable_eplb=False"),
        ("parallel", {"dp_size": 2}, "data_parallel_size=1"),
        ("parallel", {"sp_size": 2}, "data_parallel_size=1"),
        ("manager", {"_placement_strategy": "round_robin"}, "expert_placement_strategy='linear'"),
        ("manager", {"num_fused_shared_experts": 1}, "FUSION_SHARED_EXPERTS=0"),
        ("config", {"has_bias": True}, "biases"),
        ("config", {"intermediate_size_per_partition": 128}, "padded"),
        ("config", {"hidden_dim": 64}, "padded"),
    ],
)
def test_experts_that_layouts_cannot_share(
    where: str, changes: dict[str, Any], message: str
) -> None:
    model = empty(ONE.place_of(0))
    experts = routed(model)
    MaterializedShards().check(model)
    if where == "parallel":
        parallel = replace(experts.moe_config.moe_parallel_config, **changes)
        experts.moe_config.moe_parallel_config = parallel
    else:
        owners = {
            "method": experts.quant_method,
            "config": experts.moe_config,
            "manager": experts.expert_map_manager,
        }
        for name, value in changes.items():
            assert hasattr(owners[where], name)
            setattr(owners[where], name, value)
    with pytest.raises(ValueError, match=rf"experts\.routed_experts .*{message}"):
        MaterializedShards().check(model)


def test_quantized_experts_are_refused() -> None:
    model = empty(ONE.place_of(0))
    routed(model).quant_method = nn.Identity()
    with pytest.raises(ValueError, match="quantized with Identity"):
        MaterializedShards().check(model)


def test_joined_gates_are_refused() -> None:
    model = empty(ONE.place_of(0))
    model["experts"].gate = model["experts"].shared_expert_gate = nn.Linear(HIDDEN, 1)
    with pytest.raises(ValueError, match="experts: vLLM joins the gates"):
        MaterializedShards().check(model)


# ------------------------------------------------------------------------------ whole models


def build(vllm_config: VllmConfig, place: Place) -> nn.Module:
    vllm_config.compilation_config.static_forward_context.clear()
    with in_place(place, vllm_config.parallel_config):
        return initialize_model(vllm_config)


WAYS = {"both kinds": LAYOUTS} | {
    f"{kind} from two": [Layout.of(tp, RANKS, kind) for tp in (2, 4)] for kind in KINDS
}
"""From a rank that has all of the model, and from one that has half of it."""


REFUSED = ("qwen2_moe", "ep from two")
"""Six experts do not divide among four ranks (see `tests/test_mixture.py`)."""


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in MODELS for way in WAYS if (name, way) != REFUSED]
)
def test_a_whole_model(name: str, way: str) -> None:
    """Adding a class of models with experts is a line here, if its layers are known."""
    vllm_config = vllm_config_for(random_model(name), tp=1)
    for rank in range(RANKS):
        check_whole_model(vllm_config, WAYS[way], rank)


def check_whole_model(vllm_config: VllmConfig, layouts: Sequence[Layout], rank: int) -> None:
    """Copies, and views through a walk over all layouts, are what vLLM loads in each."""
    user = vllm_config.load_config
    first, *wider = layouts

    def loaded_at(layout: Layout) -> nn.Module:
        return load(build(vllm_config, layout.place_of(rank)), vllm_config, user)

    expected = {one: loaded_at(one) for one in layouts}
    base = loaded_at(first)
    for layout in wider:
        model = build(vllm_config, layout.place_of(rank))
        derive(base, model)
        assert_same_weights(model, expected[layout])

    strategy = InPlaceShards(layouts, rank)
    models = {}
    for layout in wider:
        with strategy.building():
            models[layout] = build(vllm_config, layout.place_of(rank))
    strategy.capture(base)
    for model in models.values():
        strategy.fill(model)
    strategy.release()
    models[first] = base
    for layout in [*wider, first, *reversed(wider), first]:
        strategy.arrange(layout)
        assert_same_weights(models[layout], expected[layout])
    assert all(storages(model) == storages(base) for model in models.values())

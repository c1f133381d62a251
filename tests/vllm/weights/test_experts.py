"""Experts, cut and spread: bit for bit what vLLM loads at that tp, in one storage or copies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import layer as vllm_layer
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.platforms import current_platform

from pat_vllm.layout import Experts, Layout, Place
from pat_vllm.patches.weights import keep_plain_weights
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.weights.model_weights import model_weights
from pat_vllm.weights.shards import ExpertPartition
from tests.support.models import random_model
from tests.vllm.weights.test_inplace import check_walk
from tests.vllm.weights.test_weights import (
    assert_same_weights,
    build,
    check_whole_model,
    derive,
    in_place,
    load,
    scaled,
    shared,
    values,
    vllm_config_for,
)

RANKS = 4
HIDDEN, INTERMEDIATE = 32, 64
KINDS: tuple[Experts, ...] = ("tp", "ep")
LAYOUTS = ONE, *WIDER = [Layout.of(tp, RANKS) for tp in (1, 2, 4)]
every_kind = pytest.mark.parametrize("kind", KINDS)
MODELS = [
    *("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "qwen3_next"),
    *("deepseek_v2", "deepseek_v3"),
]


# -------------------------------------------------------------------- one layer


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
    model: Any = empty(place, experts)
    assert list(model["experts"].load_weights(checkpoint.items())), "vLLM has loaded nothing"
    return model  # type: ignore[no-any-return]


def routed(model: Any) -> RoutedExperts:
    experts = model["experts"].routed_experts
    assert isinstance(experts, RoutedExperts)
    return experts


@pytest.mark.parametrize("experts", [8, 5])
def test_spread_experts_lie_where_vllm_maps_them(experts: int) -> None:
    for tp in (2, 4):
        for tp_rank in range(tp):
            count, placed, _ = determine_expert_map(tp, tp_rank, experts)
            (piece,) = ExpertPartition(experts).shard(tp, tp_rank).pieces
            assert placed is not None
            assert count == piece.length
            own = [expert for expert, at in enumerate(placed.tolist()) if at >= 0]
            assert own == list(range(piece.src, piece.src + piece.length))
            assert placed[own].tolist() == list(range(count))


@every_kind
@pytest.mark.parametrize(
    ("experts", "layouts"), [(8, LAYOUTS), (6, LAYOUTS), (5, LAYOUTS), (8, WIDER)]
)
def test_layouts_in_one_storage(experts: int, layouts: Sequence[Layout], kind: Experts) -> None:
    for rank in range(RANKS):
        places = {layout: layout.place_of(rank, kind) for layout in layouts}
        expected = {layout: loaded(place, experts) for layout, place in places.items()}
        base = loaded(places[layouts[0]], experts)
        models = {layout: empty(places[layout], experts) for layout in layouts[1:]}
        check_walk(base, models, expected, rank, random.Random(f"{experts} {rank}"), kind)
        for model in (base, *models.values()):
            assert all(weight.current.stride(-1) == 1 for weight in model_weights(model))


@every_kind
@pytest.mark.parametrize(("experts", "fused"), [(8, True), (5, False)])
def test_copies_are_what_vllm_loads(experts: int, fused: bool, kind: Experts) -> None:
    for layout in WIDER:
        for rank in range(RANKS):
            place = layout.place_of(rank, kind)
            model = empty(place, experts)
            derive(loaded(ONE.place_of(rank), experts, fused), model)
            assert_same_weights(model, loaded(place, experts))


@every_kind
def test_new_weights_reach_every_layout(kind: Experts) -> None:
    rank = 2
    base = loaded(ONE.place_of(rank))
    models = [empty(layout.place_of(rank, kind)) for layout in WIDER]
    strategy = shared(base, models, LAYOUTS, rank, kind)
    strategy.arrange(WIDER[0])
    strategy.arrange(ONE)
    scaled(base, 3)
    strategy.refresh(base, models)
    for layout, model in zip(WIDER, models, strict=True):
        strategy.arrange(layout)
        assert_same_weights(model, scaled(loaded(layout.place_of(rank, kind)), 3))


# -------------------------------------------------------------------- what runs them


def outputs(model: nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
    experts = routed(model)
    return experts.quant_method.apply(experts, x, weights, ids, None, None)


def tokens(hidden: int = HIDDEN) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, and the weights and ids of two experts for each."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand((20, 8), generator=generator)
    weights, ids = scores.topk(2)
    return torch.randn((20, hidden), generator=generator), weights, ids.to(torch.int32)


@every_kind
def test_views_run_as_vllms_own_experts(kind: Experts) -> None:
    """The ranks' outputs add up to what vLLM's packed experts give for all of them."""
    stock = loaded(ONE.place_of(0))
    routed(stock).quant_method.process_weights_after_loading(routed(stock))
    expected = outputs(stock, *tokens())
    for layout in WIDER:
        total = torch.zeros_like(expected)
        for rank in layout.ranks_of(0):
            model = empty(layout.place_of(rank, kind))
            strategy = shared(loaded(ONE.place_of(rank)), [model], [ONE, layout], rank, kind)
            strategy.arrange(layout)
            total += outputs(model, *tokens())
        torch.testing.assert_close(total, expected)


@every_kind
def test_on_a_gpu_vllm_makes_no_copy_of_views(
    kind: Experts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its method for experts looks at no platform where weights need no packing but CPU's."""
    base = loaded(ONE.place_of(1))
    models = [empty(layout.place_of(1, kind)) for layout in WIDER]
    strategy = InPlaceShards(LAYOUTS, rank=1, experts=kind)
    with monkeypatch.context() as patch:
        patch.setattr(current_platform, "is_cpu", lambda: False)
        strategy.capture(base)
        for model in models:
            strategy.fill(model)
    for model in (base, *models):
        method: Any = routed(model).quant_method
        places = [parameter.data_ptr() for parameter in model.parameters()]
        method.process_weights_after_loading(routed(model))
        kernel = method.moe_kernel
        assert kernel is not None
        method.process_weights_after_loading(routed(model))  # as after an update
        assert method.moe_kernel is kernel
        assert [parameter.data_ptr() for parameter in model.parameters()] == places


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


# -------------------------------------------------------------------- refusals


class OwnLoader(RoutedExperts):
    def weight_loader(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
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
        ("experts", {"quant_method": nn.Identity()}, "quantized with Identity"),
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
            "experts": experts,
        }
        for name, value in changes.items():
            assert hasattr(owners[where], name)
            setattr(owners[where], name, value)
    with pytest.raises(ValueError, match=rf"experts\.routed_experts .*{message}"):
        MaterializedShards().check(model)


def test_unknown_loaders_and_joined_gates_are_refused() -> None:
    model: Any = empty(ONE.place_of(0), routed_experts_cls=OwnLoader)
    with pytest.raises(ValueError, match=r"experts\.routed_experts \(OwnLoader\)"):
        MaterializedShards().check(model)
    model = empty(ONE.place_of(0))
    model["experts"].gate = model["experts"].shared_expert_gate = nn.Linear(HIDDEN, 1)
    with pytest.raises(ValueError, match="experts: vLLM joins the gates"):
        MaterializedShards().check(model)


# -------------------------------------------------------------------- whole models


@every_kind
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model(name: str, kind: Experts) -> None:
    """Adding a class of models with experts is a line here, if its layers are known."""
    check_whole_model(name, LAYOUTS, 3, kind)


@pytest.mark.parametrize("rank", [0, 2])
@every_kind
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_whole_model_from_half_of_it(name: str, kind: Experts, rank: int) -> None:
    check_whole_model(name, WIDER, rank, kind)


@every_kind
def test_experts_with_biases(kind: Experts) -> None:
    """Those of gpt-oss, as views and with new weights: in every layout what vLLM gives for them."""
    old, new = (
        vllm_config_for(random_model(name), tp=1) for name in ("gpt_oss", "gpt_oss_updated")
    )

    def experts_of(model: Any) -> nn.Module:
        return nn.ModuleDict({"experts": model.model.layers[1].mlp.experts})

    stock = experts_of(load(new, ONE.place_of(0), new.load_config))
    routed(stock).quant_method.process_weights_after_loading(routed(stock))
    x, weights, ids = tokens(128)
    expected = outputs(stock, x, weights, ids)
    totals = dict.fromkeys(WIDER, torch.zeros_like(expected))
    for rank in range(RANKS):
        base: Any = load(old, ONE.place_of(rank), old.load_config)
        models = [build(old, layout.place_of(rank, kind)) for layout in WIDER]
        strategy = shared(base, models, LAYOUTS, rank, kind)
        with in_place(ONE.place_of(rank), old.parallel_config):
            checkpoint = load_file(Path(new.model_config.model) / "model.safetensors")
            base.load_weights(checkpoint.items())
        strategy.refresh(base, models)
        for layout, model in zip(WIDER, models, strict=True):
            strategy.arrange(layout)
            assert_same_weights(model, load(new, layout.place_of(rank, kind), new.load_config))
            if rank in layout.ranks_of(0):
                totals[layout] = totals[layout] + outputs(experts_of(model), x, weights, ids)
    for total in totals.values():
        torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-5)

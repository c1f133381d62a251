"""fp8 weights: bit for bit what vLLM has in each layout, scales included, in the base's storage."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter
from vllm.model_executor.layers.quantization.online import fp8 as online
from vllm.model_executor.model_loader import utils as loading
from vllm.model_executor.model_loader.base_loader import _has_online_quant
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing
from vllm.model_executor.model_loader.utils import process_weights_after_loading

from pat_vllm.layout import Experts, Layout, Place
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.quantization import Quantized
from pat_vllm.patches.weights import keep_plain_weights
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.kv_scales import share_kv_scales
from pat_vllm.weights.model_weights import quantized_layers
from pat_vllm.weights.opened_reload import OpenedReload
from pat_vllm.worker.layout_weights import renew_absorbed
from tests.support import fp8_on_cpu
from tests.support.models import random_model
from tests.vllm.weights.test_weights import build, in_place, load, vllm_config_for

RANKS = 4
BLOCKS = "fp8_per_block"
CPU = torch.device("cpu")
LAYOUTS = [Layout.of(tp, RANKS) for tp in (1, 2, 4)]


@pytest.fixture(autouse=True, scope="module")
def on_cpu() -> Iterator[None]:
    with fp8_on_cpu.applied():
        yield


class Ranks:
    """The largest values of all ranks of a group, which load one after the other.

    In the first pass each is told its own, in the second those of all.
    """

    def __init__(self) -> None:
        self.seen: dict[Place, list[torch.Tensor]] = {}
        self.at: Place | None = None
        self.calls = 0

    def reduce(self, amax: torch.Tensor, sharded: bool) -> torch.Tensor:
        if not sharded:
            return amax
        assert self.at is not None
        own = self.seen.setdefault(self.at, [])
        if self.calls == len(own):
            own.append(amax.clone())
        every = [
            seen[self.calls]
            for at, seen in self.seen.items()
            if (at.tp, at.experts) == (self.at.tp, self.at.experts)
        ]
        self.calls += 1
        return torch.stack(every).amax(0)


def ready(config: VllmConfig, model: nn.Module, place: Place) -> nn.Module:
    """The model as a runner has it."""
    with in_place(place, config.parallel_config):
        if _has_online_quant(model):
            finalize_layerwise_processing(model, config.model_config)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def stock(
    config: VllmConfig, layout: Layout, rank: int, experts: Experts, ranks: Ranks
) -> nn.Module:
    """What vLLM has on a rank of a static engine."""
    group = layout.ranks_of(layout.replica_of(rank))
    for each in (*group, rank):
        ranks.at, ranks.calls = layout.place_of(each, experts), 0
        model = load(config, ranks.at, config.load_config)
        keep_plain_weights(model)
        ready(config, model, ranks.at)
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All but what processing puts into buffers, and NeMo-RL's leaves."""
    every = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: t for n, t in every.items() if not isinstance(t, KVCacheScaleParameter)}


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    actual, wanted = tensors(model), tensors(expected)
    assert sorted(actual.keys() ^ wanted.keys()) == []
    for name, tensor in actual.items():
        other = wanted[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        if tensor.numel():
            same = (each.contiguous().reshape(-1).view(torch.uint8) for each in (tensor, other))
            assert torch.equal(*same), f"{name} differs"


def engine_of(
    config: VllmConfig, layouts: Sequence[Layout], rank: int, experts: Experts, ranks: Ranks
) -> tuple[InPlaceShards, dict[Layout, nn.Module]]:
    """The models of a rank's layouts in one storage, loaded as a worker does."""
    strategy = InPlaceShards(layouts, rank, experts)
    models: dict[Layout, nn.Module] = {}
    for layout in layouts:
        place = ranks.at = layout.place_of(rank, experts)
        ranks.calls = 0
        if not models:
            model = build(config, place)
            strategy.check(model)
            model = load(config, place, config.load_config)
            strategy.capture(model)
        else:
            with strategy.building():
                model = build(config, place)
            strategy.fill(model)
        models[layout] = ready(config, model, place)
        share_kv_scales(models[layout], models[layouts[0]])
    strategy.release()
    return strategy, models


MODELS = [
    *(("fp8", how) for how in ("fp8_per_channel", "fp8_per_tensor", "fp8_per_block")),
    ("fp8_biased", "fp8_per_channel"),
    *((f"fp8_{how}", None) for how in ("blocks", "channels", "tensors", "modelopt")),
    *(("fp8_moe", how) for how in ("fp8_per_channel", "fp8_per_tensor")),
    *((f"fp8_moe_{how}", None) for how in ("blocks",)),
    ("fp8_latent_blocks", None),
]


def ranks_of(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    """Those that load from here on."""
    ranks = Ranks()
    monkeypatch.setattr(online, "amax_for_tp_weight_quant", ranks.reduce)
    monkeypatch.setattr(
        online, "amax_for_moe_weight_quant", lambda amax, tp: ranks.reduce(amax, tp > 1)
    )
    return ranks


def config_of(name: str, how: str | None) -> VllmConfig:
    options = {} if how is None else {"quantization": how}
    return vllm_config_for(random_model(name), tp=1, dtype="bfloat16", **options)


def kinds(name: str) -> list[Experts]:
    """How the experts of a model may lie."""
    return ["tp", "ep"] if "moe" in name else ["tp"]


@pytest.mark.parametrize("base_tp", [1, 2])
@pytest.mark.parametrize(("name", "how"), MODELS)
def test_every_layout_has_what_vllm_has_there(
    name: str, how: str | None, base_tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = [layout for layout in LAYOUTS if layout.tp >= base_tp]
    rng = random.Random(name)
    for experts in kinds(name):
        walk(name, how, layouts, rng.randrange(RANKS), monkeypatch, experts)


def walk(
    name: str,
    how: str | None,
    layouts: Sequence[Layout],
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    experts: Experts = "tp",
) -> dict[Layout, nn.Module]:
    """Go through the layouts in random order, and compare each with vLLM's at that tp.

    Args:
        name, how: as `config_of` takes them.
        layouts: the base layout first.

    Returns:
        A rank's models.
    """
    ranks, rng, config = ranks_of(monkeypatch), random.Random(name), config_of(name, how)
    expected = {layout: stock(config, layout, rank, experts, ranks) for layout in layouts}
    strategy, models = engine_of(config, layouts, rank, experts, ranks)
    size = ModelSize.of(config.model_config.hf_config.to_dict(), 2, Quantized(weight_bytes=1))
    assert strategy.staging_bytes <= size.gathered_bytes(layouts)
    if "block" in f"{name} {how}":  # what CPU has in a block kernel's place wants no gaps
        assert strategy.staging_bytes >= size.gathered_bytes(layouts) / 4
    places = {at: [t.data_ptr() for t in tensors(model).values()] for at, model in models.items()}
    for layout in [*layouts, *rng.choices(layouts, k=8), layouts[0]]:
        strategy.arrange(layout)
        assert_same(models[layout], expected[layout])
    for at, model in models.items():
        now = [tensor.data_ptr() for tensor in tensors(model).values()]
        assert now == places[at], "compiled code would miss them"
    return models


def loaded(name: str) -> nn.Module:
    """A model in one layout, processed."""
    config = vllm_config_for(random_model(name), tp=1, dtype="bfloat16")
    place = LAYOUTS[0].place_of(0)
    return ready(config, load(config, place, config.load_config), place)


def set_scales(layer: Any) -> None:
    layer.weight_scale_inv = nn.Parameter(torch.zeros(512, 1, dtype=torch.int32), False)


def pad(layer: Any) -> None:
    layer.weight = nn.Parameter(torch.cat([layer.weight.data, layer.weight.data]), False)


def set_kernel(layer: Any) -> None:
    layer.quant_method.fp8_linear = nn.Identity()


def set_block(layer: Any) -> None:
    layer.weight_block_size = [1, 128]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (set_scales, ["qkv_proj.weight_scale_inv is packed", "int32", "VLLM_USE_DEEP_GEMM=0"]),
        (pad, ["qkv_proj.weight is padded", "linear_backend"]),
        (set_kernel, ["qkv_proj runs with Identity", "linear_backend"]),
        (set_block, ["blocks of 1 x 128"]),
    ],
)
def test_what_layouts_cannot_share_is_refused(change: Any, parts: list[str]) -> None:
    model: Any = loaded("fp8_blocks")
    change(model.model.layers[0].self_attn.qkv_proj)
    with pytest.raises(ValueError) as error:
        for layer in quantized_layers(model).values():
            list(layer.weights())
    for part in [*parts, "static tensor_parallel_size"]:
        assert part in str(error.value)


def test_shards_that_end_inside_a_block_are_named_before_weights_are_read() -> None:
    config = vllm_config_for(random_model("qwen3"), tp=1, dtype="bfloat16", quantization=BLOCKS)
    strategy = InPlaceShards(LAYOUTS, 3)
    with pytest.raises(ValueError, match=r"qkv_proj, .*320 is not a multiple of 128, for tp=2"):
        strategy.check(build(config, LAYOUTS[0].place_of(3)))


@pytest.mark.parametrize(("base_tp", "processed"), [(1, False), (2, True)])
@pytest.mark.parametrize(("name", "how"), MODELS)
def test_what_a_trainer_loads_reaches_every_layout(
    name: str, how: str | None, base_tp: int, processed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call for each tensor, as OpenRLHF makes: in 16 bits, or as in the checkpoint.

    Some trainers then have vLLM process the model, as it does after it has loaded one.
    """
    rng = random.Random(name)
    layouts = [layout for layout in LAYOUTS if layout.tp >= base_tp]
    for experts in kinds(name):
        update(name, how, layouts, rng.randrange(RANKS), monkeypatch, experts, processed)


def update(
    name: str,
    how: str | None,
    layouts: Sequence[Layout],
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    experts: Experts = "tp",
    processed: bool = False,
) -> dict[Layout, nn.Module]:
    """Load a model's update, and compare each layout with what vLLM makes of that; as `walk`.

    Args:
        processed: the trainer has vLLM process the model.
    """
    rng = random.Random(name)
    config, new = (config_of(each, how) for each in (name, f"{name}_updated"))
    ranks = ranks_of(monkeypatch)
    stock(config, layouts[0], rank, experts, ranks)
    strategy, models = engine_of(config, layouts, rank, experts, ranks)
    base, *others = models.values()
    reload = OpenedReload(base, config)
    strategy.arrange(layouts[-1])

    ranks = ranks_of(monkeypatch)
    expected = {layout: stock(new, layout, rank, experts, ranks) for layout in layouts}
    strategy.arrange(layouts[0])
    ranks.at = layouts[0].place_of(rank, experts)
    with in_place(ranks.at, config.parallel_config):
        for _ in range(1 if processed else 2):  # the second time before any step
            ranks.calls = 0
            for weight in load_file(random_model(f"{name}_updated") / "model.safetensors").items():
                base.load_weights([weight])
            assert reload.is_open
        if processed:
            loading.process_weights_after_loading(base, config.model_config, CPU)
        else:
            reload.close()
        assert not reload.is_open
    strategy.refresh(base, others)
    for model in models.values():
        renew_absorbed(model)
        share_kv_scales(model, base)
    for layout in [*layouts, *rng.choices(layouts, k=4)]:
        strategy.arrange(layout)
        assert_same(models[layout], expected[layout])
    return models


Push = Callable[[nn.Module, VllmConfig, str], None]


def check_pushes(
    name: str, config: VllmConfig, base_tp: int, push: Push, static_push: Push | None = None
) -> None:
    """What a trainer pushes reaches every layout: each has what vLLM has at its tp afterwards.

    Args:
        push: as the trainer's code does, which makes parameters fit where `static_push` is None.
        static_push: the same for vLLM's models.
    """
    layouts = [layout for layout in LAYOUTS if layout.tp >= base_tp]
    rng, ranks = random.Random(name), Ranks()
    for experts in kinds(name):
        rank = rng.randrange(RANKS)
        static = {layout: stock(config, layout, rank, experts, ranks) for layout in layouts}
        strategy, models = engine_of(config, layouts, rank, experts, ranks)
        base, *others = models.values()
        reload = OpenedReload(base, config)
        for pushed in (f"{name}_updated", name):
            for layout, model in static.items():
                with in_place(layout.place_of(rank, experts), config.parallel_config):
                    (static_push or push)(model, config, pushed)
                renew_absorbed(model)  # VeRL leaves what vLLM has made of the old weights
            strategy.arrange(layouts[0])
            with in_place(layouts[0].place_of(rank, experts), config.parallel_config):
                push(base, config, pushed)
            if static_push is None:
                assert not reload.is_open
            else:
                reload.close()
            strategy.refresh(base, others)
            for model in models.values():
                renew_absorbed(model)
                share_kv_scales(model, base)
            for layout in [*layouts, *rng.choices(layouts, k=4)]:
                strategy.arrange(layout)
                assert_same(models[layout], static[layout])

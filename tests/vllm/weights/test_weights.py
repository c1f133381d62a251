"""Derived weights equal, bit for bit, what vLLM's own weight loaders give at that tp.

Real vLLM layers and models of several ranks and layouts are built in this one process: all that
they ask of the tensor-parallel group while they are built and loaded is its size and their rank.
"""

from __future__ import annotations

import json
import operator
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.config import LoadConfig, ParallelConfig, VllmConfig
from vllm.config.utils import update_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import get_model, get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from pat_vllm.layout import Experts, Layout, Place
from pat_vllm.patches.weights import keep_plain_weights
from pat_vllm.start.setup import Setup
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.loaders import (
    BASE_FORMAT,
    DERIVED_FORMAT,
    change_user_config,
    load_config_of,
)
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.weights.model_weights import model_weights
from pat_vllm.worker.layout_config import layout_config
from tests.support import vision
from tests.support.engines import REFERENCE_MLA
from tests.support.models import random_model

HIDDEN = 24


@contextmanager
def as_rank(tp: int, rank: int) -> Iterator[None]:
    """Inside, vLLM's layers believe to be rank `rank` of a TP group of `tp`."""
    previous = parallel_state._TP, parallel_state._PP
    parallel_state._TP = SimpleNamespace(world_size=tp, rank_in_group=rank)
    parallel_state._PP = SimpleNamespace(
        world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True
    )
    try:
        yield
    finally:
        parallel_state._TP, parallel_state._PP = previous


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {weight.name: weight.tensor.clone() for weight in model_weights(model)}


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    actual, wanted = values(model), values(expected)
    assert actual.keys() == wanted.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor, wanted[name]), f"{name} differs"


def derive(base: nn.Module, model: nn.Module) -> None:
    """Fill `model` as the worker does that has `base`."""
    for weight in model_weights(model):
        # What nobody writes should differ from everything.
        weight.tensor.fill_(float("nan"))
    strategy = MaterializedShards()
    strategy.capture(base)
    strategy.fill(model)


def scaled(model: nn.Module, factor: int) -> nn.Module:
    for weight in model_weights(model):
        weight.tensor.mul_(factor)
    return model


# -------------------------------------------------------------------- one layer class at a time


@dataclass(frozen=True)
class Case:
    """One layer, the checkpoint tensors (parameter, shard id, shape) it is loaded from, its tps."""

    name: str
    build: Callable[[], nn.Module]
    checkpoint: list[tuple[str, str | int | None, tuple[int, ...]]]
    tps: tuple[int, ...] = (1, 2, 4)

    def empty(self, tp: int, rank: int) -> nn.ModuleDict:
        """The layer as vLLM builds it for that rank, in a model."""
        with as_rank(tp, rank):
            return nn.ModuleDict({"layer": self.build()})

    def load(self, tp: int, rank: int) -> nn.ModuleDict:
        """The layer as vLLM loads it for that rank; the same checkpoint every time."""
        generator = torch.Generator().manual_seed(0)
        model = self.empty(tp, rank)
        for name, shard_id, shape in self.checkpoint:
            tensor = torch.randn(shape, generator=generator)
            parameter = getattr(model["layer"], name)
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            with as_rank(tp, rank):
                loader(parameter, tensor, *([] if shard_id is None else [shard_id]))
        return model


def qkv(heads: int, kv_heads: int, tps: tuple[int, ...], head: int = 4, v_head: int = 4) -> Case:
    rows: dict[str | int, int] = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * v_head}
    return Case(
        f"qkv-{heads}-{kv_heads}-{head}-{v_head}",
        lambda: QKVParallelLinear(HIDDEN, head, heads, kv_heads, bias=True, v_head_size=v_head),
        [("weight", s, (n, HIDDEN)) for s, n in rows.items()]
        + [("bias", s, (n,)) for s, n in rows.items()],
        tps,
    )


def whole(
    name: str, build: Callable[[], nn.Module], rows: int, tps: tuple[int, ...] = (1, 2, 4)
) -> Case:
    """A layer with a matrix of so many rows and a bias, which are not fused."""
    return Case(name, build, [("weight", None, (rows, HIDDEN)), ("bias", None, (rows,))], tps)


CASES = [
    qkv(heads=8, kv_heads=4, tps=(1, 2, 4)),
    qkv(heads=12, kv_heads=6, tps=(1, 2, 3, 6)),
    # Replicated KV heads: from tp=4, and from the start.
    qkv(heads=8, kv_heads=2, tps=(1, 2, 4, 8)),
    qkv(heads=12, kv_heads=1, tps=(1, 2, 3, 4, 6)),
    qkv(heads=8, kv_heads=2, tps=(1, 2, 4), head=6, v_head=2),
    Case(
        "gate_up",
        lambda: MergedColumnParallelLinear(HIDDEN, [24, 48], bias=True),
        [
            ("weight", 0, (24, HIDDEN)),
            ("weight", 1, (48, HIDDEN)),
            ("bias", 0, (24,)),
            ("bias", 1, (48,)),
        ],
        (1, 2, 3, 4, 6),
    ),
    whole("column", lambda: ColumnParallelLinear(HIDDEN, 36, bias=True), 36, (1, 2, 3, 4, 6)),
    whole(
        "column-tp-disabled",
        lambda: ColumnParallelLinear(HIDDEN, 35, bias=True, disable_tp=True),
        35,
    ),
    whole("row", lambda: RowParallelLinear(HIDDEN, 35, bias=True), 35, (1, 2, 3, 4, 6)),
    whole("replicated", lambda: ReplicatedLinear(HIDDEN, 35, bias=True), 35),
    Case(
        "VocabParallelEmbedding-130",
        lambda: VocabParallelEmbedding(130, HIDDEN),
        [("weight", None, (130, HIDDEN))],
        (1, 2, 3, 4, 6),
    ),
    # At tp=4 the third shard is mostly padding and the last one is nothing else.
    whole("ParallelLMHead-70", lambda: ParallelLMHead(70, HIDDEN, bias=True), 70),
    Case(
        "gated_norm",
        lambda: Mixer2RMSNormGated(HIDDEN, 6),
        [("weight", None, (HIDDEN,))],
        (1, 2, 3, 6),
    ),
    Case("rms_norm", lambda: RMSNorm(HIDDEN), [("weight", None, (HIDDEN,))]),
    Case("layer_norm", lambda: LayerNorm(HIDDEN), [(n, None, (24,)) for n in ("weight", "bias")]),
    Case("position_embedding", lambda: nn.Embedding(7, 5), [("weight", None, (7, 5))]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_shard_is_what_vllm_loads(case: Case) -> None:
    for base_tp, tp in product(case.tps, case.tps):
        if tp % base_tp:
            continue
        for rank in range(tp):
            model = case.empty(tp, rank)
            storage = {weight.name: weight.tensor.data_ptr() for weight in model_weights(model)}
            derive(case.load(base_tp, rank * base_tp // tp), model)
            assert_same_weights(model, case.load(tp, rank))
            assert storage == {w.name: w.tensor.data_ptr() for w in model_weights(model)}


# -------------------------------------------------------------------- tied weights


def embedding_and_head(tp: int, rank: int, tie: bool) -> Any:
    model: Any = nn.ModuleDict()
    with as_rank(tp, rank):
        model["embed"] = VocabParallelEmbedding(100, HIDDEN)
        model["head"] = ParallelLMHead(100, HIDDEN)
    if tie:
        model["head"].tie_weights(model["embed"])
    generator = torch.Generator().manual_seed(1)
    for layer in (model["embed"], model["head"]):
        tensor = torch.randn((100, HIDDEN), generator=generator)
        layer.weight.weight_loader(layer.weight, tensor)
    return model


@pytest.mark.parametrize("base_tp", [1, 2])
@pytest.mark.parametrize("tie", [True, False])
def test_tied_weights_stay_tied(tie: bool, base_tp: int) -> None:
    for rank in range(4):
        expected, model = (embedding_and_head(4, rank, tie) for _ in range(2))
        derive(embedding_and_head(base_tp, rank * base_tp // 4, tie), model)
        assert (model["head"].weight is model["embed"].weight) == tie
        assert_same_weights(model, expected)


# -------------------------------------------------------------------- what PAT must refuse


class OwnLoader(ColumnParallelLinear):
    def weight_loader(self, param: Any, loaded_weight: Any) -> None:
        raise NotImplementedError


class SomeQuantMethod(LinearMethodBase):
    create_weights = apply = None


def column(cls: type[nn.Module] = ColumnParallelLinear, *, tp: int = 1, rows: int = 8) -> Any:
    with as_rank(tp, 0):
        return nn.ModuleDict({"mlp": cls(HIDDEN, rows)})


def having(model: Any, name: str, **attributes: Any) -> nn.Module:
    """The model, with other attributes of the module of this name."""
    for attribute, value in attributes.items():
        setattr(operator.attrgetter(name)(model), attribute, value)
    return model  # type: ignore[no-any-return]


def extra_parameter() -> nn.Module:
    scale = nn.Parameter(torch.ones(8))
    model = having(column(), "mlp", scale=scale)
    scale.weight_loader = model["mlp"].weight_loader  # type: ignore[attr-defined, index]
    return model


def packed() -> nn.Module:
    model = column()
    model["mlp"].quant_method.process_weights_after_loading(model["mlp"])
    assert model["mlp"].weight.numel() == 0, "vLLM no longer packs on CPU"
    return model  # type: ignore[no-any-return]


QUANTIZED = SomeQuantMethod()
UNFIT: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "unknown class": (lambda: nn.ModuleDict({"mlp": nn.Bilinear(2, 2, 2)}), ["mlp", "Bilinear"]),
    "own loader": (lambda: column(OwnLoader), ["mlp (OwnLoader)"]),
    "own loader of a parameter": (
        lambda: having(column(), "mlp.bias", weight_loader=default_weight_loader),
        ["mlp.bias", "own weight loader"],
    ),
    "extra parameter": (extra_parameter, ["mlp.scale"]),
    "quantized": (
        lambda: having(column(), "mlp", quant_method=QUANTIZED),
        ["mlp ", "SomeQuantMethod"],
    ),
    "quantized embedding": (
        lambda: having(embedding_and_head(1, 0, tie=False), "embed", quant_method=QUANTIZED),
        ["embed ", "SomeQuantMethod"],
    ),
    "added vocabulary": (
        lambda: nn.ModuleDict({"embed": VocabParallelEmbedding(104, 8, org_num_embeddings=100)}),
        ["embed.weight has 4 embeddings added"],
    ),
    "packed": (packed, ["mlp.weight", "packed"]),
}


@pytest.mark.parametrize("name", UNFIT)
def test_models_that_cannot_be_derived(name: str) -> None:
    """They are named with what does not fit, and refused before their weights are read."""

    class Unread(MaterializedShards):
        def capture(self, model: nn.Module) -> None:
            raise AssertionError("the weights were read")

    make, parts = UNFIT[name]
    with as_rank(1, 0):
        model = make()
    loader = get_model_loader(
        load_config_of(BASE_FORMAT, LoadConfig(load_format="dummy"), Unread())
    )
    with pytest.raises(ValueError) as error:
        loader.load_weights(model, None)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(error.value)


def with_shape(model: Any, rows: int) -> nn.Module:
    model["mlp"].weight.data = torch.zeros(rows, HIDDEN)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (lambda: (column(rows=8), column(rows=16, tp=2)), r"mlp\.weight differs between layouts"),
        (lambda: (column(), column(tp=2).bfloat16()), r"mlp\.weight differs between layouts"),
        (
            lambda: (column(), nn.ModuleDict({**column(tp=2), "other": nn.Linear(2, 2)})),
            r"other\.bias exists in only one",
        ),
        (lambda: (with_shape(column(), 16), column(tp=2)), r"mlp\.weight has shape \(16, 24\)"),
        (
            lambda: (embedding_and_head(1, 0, False), embedding_and_head(2, 0, True)),
            r"head\.weight shares its storage",
        ),
    ],
)
def test_models_that_differ_between_layouts(
    pair: Callable[[], tuple[nn.Module, nn.Module]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        derive(*pair())


def test_persistent_buffers_are_copied_and_others_left_alone() -> None:
    def model(scale: float, size: int = 2) -> Any:
        module = nn.Module()
        module.register_buffer("scale", torch.full((size,), scale))
        module.register_buffer("cache", torch.full((size,), scale), persistent=False)
        return nn.ModuleDict({"attn": module})

    derived = model(1.0)
    derive(model(0.5), derived)
    assert derived["attn"].scale.tolist() == [0.5, 0.5]
    assert derived["attn"].cache.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"attn\.scale has shape \(3,\)"):
        derive(model(0.5), model(1.0, size=3))


# -------------------------------------------------------------------- whole models, vLLM's loaders


def vllm_config_for(path: Path, tp: int, **options: Any) -> VllmConfig:
    """One configuration for each layout, as the worker makes them; the model's name is in all."""
    if "kv_lora_rank" in json.loads((path / "config.json").read_text()):
        options = REFERENCE_MLA | options
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 64} | options
    args = EngineArgs(str(path), **options)
    vllm_config = args.create_engine_config()
    vllm_config.parallel_config.tensor_parallel_size = tp
    return vllm_config


@contextmanager
def in_place(place: Place, parallel: ParallelConfig) -> Iterator[None]:
    """Inside, vLLM builds layers for that place."""
    group = SimpleNamespace(
        device_group=SimpleNamespace(size=lambda: place.tp),
        world_size=place.tp,
        rank_in_group=place.tp_rank,
    )
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    with pytest.MonkeyPatch.context() as patch, as_rank(place.tp, place.tp_rank):
        for name, value in {"_EP": group, "_DP": alone, "_PCP": alone}.items():
            patch.setattr(parallel_state, name, value)
        patch.setattr(parallel, "enable_expert_parallel", place.experts == "ep")
        yield


def build(vllm_config: VllmConfig, place: Place) -> nn.Module:
    vllm_config.compilation_config.static_forward_context.clear()
    dtype = set_default_torch_dtype(vllm_config.model_config.dtype)
    with dtype, in_place(place, vllm_config.parallel_config):
        return initialize_model(vllm_config)


def load(vllm_config: VllmConfig, place: Place, load_config: LoadConfig) -> nn.Module:
    """vLLM's `load_model` without the packing that follows, which would hide the weights."""
    model = build(vllm_config, place)
    with in_place(place, vllm_config.parallel_config):
        get_model_loader(load_config).load_weights(model, vllm_config.model_config)
    return model


def storages(model: nn.Module) -> set[int]:
    """Of weights of which layouts can share the storage."""
    return {
        weight.current.untyped_storage()._cdata
        for weight in model_weights(model)
        if all(cut.partition.nested for cut in weight.cuts)
    }


def shared(
    base: nn.Module,
    models: Iterable[nn.Module],
    layouts: Sequence[Layout],
    rank: int,
    experts: Experts = "tp",
) -> InPlaceShards:
    """One storage, with the models of other layouts than the first filled."""
    strategy = InPlaceShards(layouts, rank, experts)
    strategy.check(base)
    strategy.capture(base)
    for model in models:
        strategy.fill(model)
    strategy.release()
    return strategy


def check_whole_model(
    name: str,
    layouts: Sequence[Layout],
    rank: int,
    experts: Experts = "tp",
    **options: Any,
) -> None:
    """Copies, and views through a walk over all layouts, are what vLLM loads in each."""
    if name in vision.CLASSES:
        options = vision.TEXT_ONLY | options
    vllm_config = vllm_config_for(random_model(name), tp=1, **options)
    user = vllm_config.load_config
    first, *wider = layouts

    def loaded_at(layout: Layout) -> nn.Module:
        return load(vllm_config, layout.place_of(rank, experts), user)

    expected = {layout: loaded_at(layout) for layout in layouts}
    base = loaded_at(first)
    for layout in wider:
        model: Any = build(vllm_config, layout.place_of(rank, experts))
        derive(base, model)
        assert_same_weights(model, expected[layout])
        if name == "qwen3_tied":
            assert model.lm_head.weight is model.model.embed_tokens.weight

    models = {}
    for layout in wider:
        with InPlaceShards(layouts, rank, experts).building():
            models[layout] = build(vllm_config, layout.place_of(rank, experts))
        assert all(weight.untyped_storage().nbytes() == 0 for weight in models[layout].parameters())
    strategy = shared(base, models.values(), layouts, rank, experts)
    models[first] = base
    for layout in [*wider, first, *reversed(wider), first]:
        strategy.arrange(layout)
        assert_same_weights(models[layout], expected[layout])
        for layer in models[layout].modules():
            if isinstance(layer, MambaMixer2):
                assert layer.conv_weights.data_ptr() == layer.conv1d.weight.data_ptr()
    assert all(storages(model) == storages(base) for model in models.values())


def check_ranks(name: str, base_tp: int, ranks: Iterable[int]) -> None:
    """Of four, in the layouts from `base_tp` on."""
    for rank in ranks:
        check_whole_model(name, [Layout.of(tp, 4) for tp in (1, 2, 4) if tp >= base_tp], rank)


@pytest.mark.parametrize(
    ("name", "base_tp", "ranks"),
    [
        ("qwen3", 1, [0, 2]),
        ("qwen2", 2, [1, 3]),
        ("llama_few_kv", 1, [1, 3]),
        ("qwen3_tied", 1, [3]),
        ("qwen3_tied", 2, [0]),
        ("gemma3", 1, [1]),
        ("gemma2", 1, [2]),
        ("mistral", 2, [3]),
        ("phi3", 1, [2]),
        ("llama4", 1, [3]),
        ("nemotron_h", 1, [1, 2]),
        ("nemotron_h", 2, [3]),
        # Text models of classes for images, whose checkpoints have a tower and their own names.
        ("gemma3_vl", 1, [1]),
        ("qwen2_5_vl", 2, [3]),
        ("qwen3_vl", 1, [2]),
        ("qwen3_5_vl", 1, [3]),
        ("qwen3_5_moe_vl", 2, [1]),
    ],
)
def test_a_whole_model(name: str, base_tp: int, ranks: list[int]) -> None:
    check_ranks(name, base_tp, ranks)


@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_vl", "gemma3_vl"]
)
def test_a_whole_model_with_its_tower(name: str) -> None:
    """The tower is whole on each rank, but Gemma's, which is cut."""
    mode = "weights" if name == "gemma3_vl" else "data"
    options: dict[str, Any] = {"language_model_only": False, "mm_encoder_tp_mode": mode}
    check_whole_model(name, [Layout.of(tp, 4) for tp in (1, 2, 4)], 3, **options)


def test_vllms_kernels_for_packed_linear_attention_are_refused(
    stock_linear_attention: None,
) -> None:
    with pytest.raises(ValueError, match=r"pat\.weights='materialized' or 'auto'"):
        check_ranks("qwen3_next", 1, [0])


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's CPU runner has it: there is none whose cache could be emptied."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)


def test_through_vllms_get_model_the_checkpoint_is_read_once(tmp_path: Path) -> None:
    """Under the user's load configuration; then the plain weights are let go."""
    path = shutil.copytree(random_model("qwen2"), tmp_path / "model")
    vllm_config = vllm_config_for(path, tp=1)
    user = vllm_config.load_config
    expected = values(load(vllm_config, Place(2, 1), user))
    strategy = Plain()
    vllm_config.load_config = load_config_of(BASE_FORMAT, user, strategy)
    loader: Any = get_model_loader(vllm_config.load_config)
    assert loader.loader.load_config is user
    vllm_config.compilation_config.static_forward_context.clear()
    with as_rank(1, 0):
        get_model(vllm_config=vllm_config)
    for checkpoint in path.glob("*.safetensors"):
        checkpoint.unlink()
    layout_config = vllm_config_for(path, tp=2)
    layout_config.load_config = load_config_of(DERIVED_FORMAT, user, strategy)
    with as_rank(2, 1):
        derived = values(get_model(vllm_config=layout_config))
    assert derived.keys() == expected.keys()
    for weight, tensor in derived.items():
        assert torch.equal(tensor, expected[weight]), weight
    strategy.release()
    with pytest.raises(AssertionError, match="before capture"):
        strategy.fill(column(tp=2))


class Plain(MaterializedShards):
    """As on a GPU, where nothing is packed."""

    def capture(self, model: nn.Module) -> None:
        keep_plain_weights(model)
        super().capture(model)

    def fill(self, model: nn.Module) -> None:
        keep_plain_weights(model)
        super().fill(model)


def with_head(path: Path, change: float) -> VllmConfig:
    """For a copy of a tied model with a head, which differs from the embeddings in the last row."""
    shutil.copytree(random_model("qwen3_tied"), path)
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += change
    save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors", {"format": "pt"})
    vllm_config = vllm_config_for(path, tp=1)
    assert vllm_config.model_config.word_embeddings_untied_by_checkpoint
    return vllm_config


def views() -> InPlaceShards:
    return InPlaceShards([Layout(1, 2), Layout(2, 1)], rank=0)


@pytest.mark.parametrize("change", [0.0, 1.0], ids=["alike", "unlike"])
@pytest.mark.parametrize("make", [Plain, views], ids=["copy", "view"])
def test_a_head_that_the_checkpoint_of_a_tied_model_has(
    make: Callable[[], Any], change: float, tmp_path: Path
) -> None:
    """If it is like the embeddings, it is tied to them in every layout, or in none otherwise.

    Rank 0 of two has the rows in which it is like them in either case.
    """
    vllm_config = with_head(tmp_path / "model", change)
    user, strategy = vllm_config.load_config, make()
    vllm_config.load_config = load_config_of(BASE_FORMAT, user, strategy)
    models: dict[int, Any] = {}
    with as_rank(1, 0):
        models[1] = get_model(vllm_config=vllm_config)
    vllm_config.parallel_config.tensor_parallel_size = 2
    derived_config = layout_config(vllm_config, Setup.of(vllm_config), Layout(2, 1))
    derived_config.load_config = load_config_of(DERIVED_FORMAT, user, strategy)
    with as_rank(2, 0):
        models[2] = get_model(vllm_config=derived_config)
    strategy.release()
    for model in models.values():
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (not change)

    new = torch.randn_like(models[1].model.embed_tokens.weight)
    models[1].load_weights([("model.embed_tokens.weight", new)])
    strategy.refresh(models[1], [models[2]])
    for tp, model in models.items():
        strategy.arrange(Layout.of(tp, 2))
        rows = new[: len(new) // tp]
        assert torch.equal(model.model.embed_tokens.weight, rows)
        assert torch.equal(model.lm_head.weight, rows) == (not change)


def test_another_loader_reads_again_what_was_made_up() -> None:
    """As trainers do, which start with random weights."""
    made_up = load_config_of(BASE_FORMAT, LoadConfig(load_format="dummy"), MaterializedShards())
    first: Any = get_model_loader(made_up)
    with pytest.raises(NotImplementedError, match=r"`dummy` format.*update_config"):
        first.get_all_weights(None, None)
    asked = {"load_format": "safetensors"}
    changed = update_config(made_up, change_user_config(made_up, asked))
    second: Any = get_model_loader(changed)
    assert changed.load_format == BASE_FORMAT and second.strategy is first.strategy
    assert second.loader.load_config.load_format == "safetensors"

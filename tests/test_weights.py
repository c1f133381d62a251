"""Derived weights equal, bit for bit, what vLLM's own weight loaders give at that tp.

Real vLLM layers and models of several ranks and layouts are built in this one process: all that
they ask of the tensor-parallel group while they are built and loaded is its size and their rank.
"""

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config
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
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import get_model, get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.utils.torch_utils import set_default_torch_dtype

from pat_vllm.layout import Layout
from pat_vllm.patches.weights import keep_plain_weights
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.loaders import base_load_config, derived_load_config
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.weights.model_weights import model_weights
from pat_vllm.worker.layout_config import layout_config
from tests.models import random_model

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


@pytest.fixture(autouse=True)
def current_vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


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


# ------------------------------------------------------------------ one layer class at a time


@dataclass(frozen=True)
class Case:
    """One layer, the checkpoint tensors (parameter, shard id, shape) it is loaded from, its tps."""

    name: str
    build: Callable[[], nn.Module]
    checkpoint: list[tuple[str, str | int | None, tuple[int, ...]]]
    tps: tuple[int, ...] = (1, 2, 4)

    def empty(self, tp: int, rank: int) -> nn.Module:
        """The layer as vLLM builds it for that rank, in a model."""
        with as_rank(tp, rank):
            return nn.ModuleDict({"layer": self.build()})

    def load(self, tp: int, rank: int) -> nn.Module:
        """The layer as vLLM loads it for that rank; the same checkpoint every time."""
        generator = torch.Generator().manual_seed(0)
        model = self.empty(tp, rank)
        for name, shard_id, shape in self.checkpoint:
            tensor = torch.randn(shape, generator=generator)
            parameter = getattr(model["layer"], name)
            loader = getattr(parameter, "weight_loader", default_weight_loader)
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


def vocab(cls: type[nn.Module], size: int, tps: tuple[int, ...], bias: bool = False) -> Case:
    checkpoint: list[tuple[str, str | int | None, tuple[int, ...]]] = [
        ("weight", None, (size, HIDDEN))
    ]
    kwargs = {}
    if bias:
        checkpoint.append(("bias", None, (size,)))
        kwargs["bias"] = True
    return Case(f"{cls.__name__}-{size}", lambda: cls(size, HIDDEN, **kwargs), checkpoint, tps)


CASES = [
    qkv(heads=8, kv_heads=8, tps=(1, 2, 4)),
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
    Case(
        "column",
        lambda: ColumnParallelLinear(HIDDEN, 36, bias=True),
        [("weight", None, (36, HIDDEN)), ("bias", None, (36,))],
        (1, 2, 3, 4, 6),
    ),
    Case(
        "column-tp-disabled",
        lambda: ColumnParallelLinear(HIDDEN, 35, bias=True, disable_tp=True),
        [("weight", None, (35, HIDDEN)), ("bias", None, (35,))],
    ),
    Case(
        "row",
        lambda: RowParallelLinear(HIDDEN, 35, bias=True),
        [("weight", None, (35, HIDDEN)), ("bias", None, (35,))],
        (1, 2, 3, 4, 6),
    ),
    Case(
        "replicated",
        lambda: ReplicatedLinear(HIDDEN, 35, bias=True),
        [("weight", None, (35, HIDDEN)), ("bias", None, (35,))],
    ),
    vocab(VocabParallelEmbedding, 500, tps=(1, 2, 4)),
    vocab(VocabParallelEmbedding, 130, tps=(1, 2, 3, 4, 6)),
    # At tp=4 the third shard is mostly padding and the last one is nothing else.
    vocab(ParallelLMHead, 70, tps=(1, 2, 4), bias=True),
    Case("rms_norm", lambda: RMSNorm(HIDDEN), [("weight", None, (HIDDEN,))]),
    Case(
        "layer_norm",
        lambda: LayerNorm(HIDDEN),
        [("weight", None, (HIDDEN,)), ("bias", None, (24,))],
    ),
    Case("position_embedding", lambda: nn.Embedding(7, 5), [("weight", None, (7, 5))]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_shard_is_what_vllm_loads(case):
    for base_tp, tp in product(case.tps, case.tps):
        if tp % base_tp:
            continue
        for rank in range(tp):
            model = case.empty(tp, rank)
            storage = {weight.name: weight.tensor.data_ptr() for weight in model_weights(model)}
            derive(case.load(base_tp, rank * base_tp // tp), model)
            assert_same_weights(model, case.load(tp, rank))
            assert storage == {w.name: w.tensor.data_ptr() for w in model_weights(model)}


def test_bfloat16_stays_bfloat16():
    with set_default_torch_dtype(torch.bfloat16):
        case = qkv(heads=8, kv_heads=2, tps=(1, 4))
        model = case.empty(4, 2)
        derive(case.load(1, 0), model)
        assert model["layer"].weight.dtype == torch.bfloat16
        assert_same_weights(model, case.load(4, 2))


def test_a_second_capture_takes_up_changed_weights():
    case = qkv(heads=8, kv_heads=2, tps=(1, 4))
    base, model = case.load(1, 0), case.load(4, 3)
    strategy = MaterializedShards()
    for factor in (2, 3):
        strategy.capture(base)
        strategy.fill(model)
        strategy.release()
        assert_same_weights(model, scaled(case.load(4, 3), factor - 1))
        scaled(base, factor)
    strategy.capture(base)
    strategy.fill(model)
    assert_same_weights(model, scaled(case.load(4, 3), 6))


def test_captured_values_outlive_what_vllm_makes_of_the_parameter():
    case = qkv(heads=8, kv_heads=2, tps=(1, 4))
    base, model = case.load(1, 0), case.load(4, 3)
    strategy = MaterializedShards()
    strategy.capture(base)
    layer = base["layer"]
    layer.weight = nn.Parameter(torch.empty(0))
    layer.bias.data = layer.bias.data.double() + 1  # as packing for AMX does, but for the 1
    strategy.fill(scaled(model, 0))
    assert_same_weights(model, case.load(4, 3))


def scaled(model: nn.Module, factor: int) -> nn.Module:
    for weight in model_weights(model):
        weight.tensor.mul_(factor)
    return model


# ---------------------------------------------------------------------------------- tied weights


def embedding_and_head(tp: int, rank: int, tie: bool) -> nn.Module:
    model = nn.ModuleDict()
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
def test_tied_weights_stay_tied(tie, base_tp):
    for rank in range(4):
        expected, model = (embedding_and_head(4, rank, tie) for _ in range(2))
        derive(embedding_and_head(base_tp, rank * base_tp // 4, tie), model)
        assert (model["head"].weight is model["embed"].weight) == tie
        assert_same_weights(model, expected)


def test_weights_tied_in_one_layout_only_are_refused():
    with pytest.raises(ValueError, match=r"head\.weight shares its storage"):
        derive(embedding_and_head(1, 0, False), embedding_and_head(2, 0, True))


# --------------------------------------------------------------------------- what PAT must refuse


class ScaledMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(4))


class OwnLoader(ColumnParallelLinear):
    def weight_loader(self, param, loaded_weight):
        raise NotImplementedError


class OwnForward(ColumnParallelLinear):
    def forward(self, input_):
        raise NotImplementedError


class SomeQuantMethod(LinearMethodBase):
    create_weights = apply = None


def column(cls: type[nn.Module] = ColumnParallelLinear, tp: int = 1, rows: int = 8) -> nn.Module:
    with as_rank(tp, 0):
        return nn.ModuleDict({"mlp": cls(HIDDEN, rows)})


def test_unknown_class_is_named_with_its_path_and_the_known_ones():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mlp": ScaledMLP()})])})
    with pytest.raises(ValueError) as error:
        MaterializedShards().check(model)
    for part in ("layers.0.mlp", "ScaledMLP", "QKVParallelLinear", "RMSNorm", "static"):
        assert part in str(error.value)


def test_only_a_subclass_with_its_own_loader_is_unknown():
    MaterializedShards().check(column(OwnForward))
    with pytest.raises(ValueError, match=r"mlp \(OwnLoader\)"):
        MaterializedShards().check(column(OwnLoader))


def test_a_parameter_with_its_own_loader_is_refused():
    model = column()
    model["mlp"].bias.weight_loader = default_weight_loader
    with pytest.raises(ValueError, match=r"mlp\.bias .*own weight loader"):
        MaterializedShards().check(model)


def test_an_extra_parameter_is_refused():
    model = column()
    model["mlp"].register_parameter("scale", nn.Parameter(torch.ones(8)))
    model["mlp"].scale.weight_loader = model["mlp"].weight_loader
    with pytest.raises(ValueError, match=r"mlp\.scale"):
        MaterializedShards().check(model)


@pytest.mark.parametrize("build", [column, lambda: nn.ModuleDict({"mlp": ReplicatedLinear(4, 4)})])
def test_quantized_layers_are_refused(build):
    with as_rank(1, 0):
        model = build()
    model["mlp"].quant_method = SomeQuantMethod()
    with pytest.raises(ValueError, match=r"mlp .*quantized with SomeQuantMethod"):
        MaterializedShards().check(model)


def test_quantized_embeddings_are_refused():
    model = embedding_and_head(1, 0, tie=False)
    model["embed"].quant_method = SomeQuantMethod()
    with pytest.raises(ValueError, match=r"embed .*quantized with SomeQuantMethod"):
        MaterializedShards().check(model)


def test_added_vocabulary_is_refused():
    with as_rank(1, 0):
        model = nn.ModuleDict({"embed": VocabParallelEmbedding(104, 8, org_num_embeddings=100)})
    with pytest.raises(ValueError, match=r"embed\.weight has 4 embeddings added"):
        MaterializedShards().check(model)


def test_packed_weights_cannot_be_captured():
    model = column()
    model["mlp"].quant_method.process_weights_after_loading(model["mlp"])
    assert model["mlp"].weight.numel() == 0, "vLLM no longer packs on CPU"
    with pytest.raises(ValueError, match=r"mlp\.weight .*packed"):
        MaterializedShards().capture(model)


def test_layers_that_differ_between_layouts_are_refused():
    with pytest.raises(ValueError, match=r"mlp\.weight differs between layouts"):
        derive(column(rows=8), column(rows=16, tp=2))
    with pytest.raises(ValueError, match=r"mlp\.weight differs between layouts"):
        derive(column(), column(tp=2).bfloat16())
    with pytest.raises(ValueError, match=r"other\.bias exists in only one"):
        derive(column(), nn.ModuleDict({**column(tp=2), "other": nn.Linear(2, 2)}))
    with pytest.raises(ValueError, match=r"q_norm\.weight has shape \(4,\)"):
        derive(norms(8), norms(4))


def norms(size: int) -> nn.Module:
    return nn.ModuleDict({"q_norm": RMSNorm(size), "k_norm": RMSNorm(size)})


def test_a_shape_that_its_layer_does_not_imply_is_refused():
    model = column(tp=2)
    model["mlp"].weight.data = torch.zeros(3, HIDDEN)
    with pytest.raises(ValueError, match=r"mlp\.weight has shape \(3, 24\)"):
        derive(column(), model)
    base = column()
    base["mlp"].weight.data = torch.zeros(16, HIDDEN)
    with pytest.raises(ValueError, match=r"mlp\.weight has shape \(16, 24\)"):
        derive(base, column(tp=2))


def test_persistent_buffers_are_copied_and_others_left_alone():
    def model(scale: float, size: int = 2) -> nn.Module:
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


# ------------------------------------------------------------------- whole models, vLLM's loaders


def vllm_config_for(path: Path, tp: int) -> VllmConfig:
    """One configuration for each layout, as the worker makes them; the model's name is in all."""
    args = EngineArgs(str(path), dtype="float32", enforce_eager=True, max_model_len=64)
    vllm_config = args.create_engine_config()
    vllm_config.parallel_config.tensor_parallel_size = tp
    return vllm_config


def build(vllm_config: VllmConfig, tp: int, rank: int) -> nn.Module:
    vllm_config.compilation_config.static_forward_context.clear()
    with as_rank(tp, rank):
        return initialize_model(vllm_config)


def load(model: nn.Module, vllm_config: VllmConfig, load_config: LoadConfig) -> nn.Module:
    """vLLM's `load_model` without the packing that follows, which would hide the weights."""
    get_model_loader(load_config).load_weights(model, vllm_config.model_config)
    return model


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama_few_kv", "qwen3_tied"])
def test_whole_model_equals_vllms_loading_of_the_checkpoint(name):
    vllm_config = vllm_config_for(random_model(name), tp=1)
    user = vllm_config.load_config

    def loaded(tp: int, rank: int) -> nn.Module:
        return load(build(vllm_config, tp, rank), vllm_config, user)

    for base_tp in (1, 2):
        for tp in (2, 4):
            for rank in range(tp):
                base = loaded(base_tp, rank * base_tp // tp)
                model = build(vllm_config, tp, rank)
                derive(base, model)
                expected = loaded(tp, rank)
                assert_same_weights(model, expected)
                if name == "qwen3_tied":
                    assert model.lm_head.weight is model.model.embed_tokens.weight


class Spy(MaterializedShards):
    """Keeps what it filled, before vLLM packs it."""

    def fill(self, model: nn.Module) -> None:
        super().fill(model)
        self.filled = values(model)


def test_through_vllms_get_model_the_checkpoint_is_read_once(tmp_path, monkeypatch):
    # As vLLM's CPU runner has it: there is no accelerator whose cache could be emptied.
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    path = shutil.copytree(random_model("qwen2"), tmp_path / "model")
    vllm_config = vllm_config_for(path, tp=1)
    user = vllm_config.load_config
    expected = {}
    for rank in range(2):
        expected[rank] = values(load(build(vllm_config, 2, rank), vllm_config, user))

    strategy = Spy()
    vllm_config.load_config = base_load_config(user, strategy)
    vllm_config.compilation_config.static_forward_context.clear()
    with as_rank(1, 0):
        base = get_model(vllm_config=vllm_config)
    assert isinstance(base, Qwen2ForCausalLM)
    assert base.model.layers[0].mlp.down_proj.weight.numel() == 0, "vLLM no longer packs on CPU"

    for checkpoint in path.glob("*.safetensors"):
        checkpoint.unlink()
    for rank in range(2):
        layout_config = vllm_config_for(path, tp=2)
        layout_config.load_config = derived_load_config(user, strategy)
        with as_rank(2, rank):
            get_model(vllm_config=layout_config)
        assert strategy.filled.keys() == expected[rank].keys()
        for weight, tensor in strategy.filled.items():
            assert torch.equal(tensor, expected[rank][weight]), weight


class Plain(MaterializedShards):
    """As on a GPU, where nothing is packed."""

    def capture(self, model: nn.Module) -> None:
        keep_plain_weights(model)
        super().capture(model)

    def fill(self, model: nn.Module) -> None:
        keep_plain_weights(model)
        super().fill(model)


def with_head(path: Path, change: float) -> VllmConfig:
    """A copy of a model with tied embeddings, and a head that differs from them in the last row."""
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
def test_a_head_that_the_checkpoint_of_a_tied_model_has(make, change, tmp_path, monkeypatch):
    """If it is like the embeddings, it is tied to them in every layout, or in none otherwise.

    Rank 0 of two has the rows in which it is like them in either case.
    """
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    vllm_config = with_head(tmp_path / "model", change)
    user, strategy = vllm_config.load_config, make()
    vllm_config.load_config = base_load_config(user, strategy)
    models = {}
    with as_rank(1, 0):
        models[1] = get_model(vllm_config=vllm_config)
    derived_config = layout_config(vllm_config, Layout(2, 1))
    derived_config.load_config = derived_load_config(user, strategy)
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


def test_dummy_weights_are_derived_too():
    vllm_config = vllm_config_for(random_model("qwen3"), tp=1)
    user = LoadConfig(load_format="dummy")
    strategy = MaterializedShards()
    base = load(build(vllm_config, 1, 0), vllm_config, base_load_config(user, strategy))
    model = load(build(vllm_config, 2, 1), vllm_config, derived_load_config(user, strategy))
    rows = base.lm_head.weight.shape[0] // 2
    assert torch.equal(model.lm_head.weight, base.lm_head.weight[rows:])


def test_the_users_load_configuration_is_kept_and_left_alone():
    user = LoadConfig(load_format="safetensors", model_loader_extra_config={"num_threads": 3})
    config = base_load_config(user, MaterializedShards())
    loader = get_model_loader(config)
    assert loader.loader.load_config is user
    assert user == LoadConfig(
        load_format="safetensors", model_loader_extra_config={"num_threads": 3}
    )


def test_load_formats_without_plain_weights_are_refused():
    user = LoadConfig(load_format="ipc_cache")
    with pytest.raises(ValueError, match="load_format 'ipc_cache'"):
        get_model_loader(base_load_config(user, MaterializedShards()))


def test_an_unsupported_model_fails_before_it_is_read():
    class Unread(MaterializedShards):
        def capture(self, model: nn.Module) -> None:
            raise AssertionError("the weights were read")

    loader = get_model_loader(base_load_config(LoadConfig(load_format="dummy"), Unread()))
    with pytest.raises(ValueError, match="ScaledMLP"):
        loader.load_weights(nn.ModuleDict({"mlp": ScaledMLP()}), None)


def test_release_frees_the_plain_weights():
    model = column()
    strategy = MaterializedShards()
    strategy.capture(model)
    captured = strategy._base
    assert captured is not None
    tensor = weakref.ref(captured["mlp.weight"].tensor)
    del captured
    strategy.release()
    gc.collect()
    assert tensor() is None
    with pytest.raises(AssertionError, match="before capture"):
        strategy.fill(column(tp=2))

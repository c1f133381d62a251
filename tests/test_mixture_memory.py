"""What mixtures of experts take: weights as vLLM makes them, tables of swaps, workspaces."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.memory.buffers import EngineShape, all_buffers
from pat_vllm.memory.model import ModelShape, _swapped
from pat_vllm.memory.rank_memory import GPU, H100, MiB, communicator_bytes, rank_memory
from pat_vllm.mixture import Mixture
from pat_vllm.model_size import MODEL_SHAPES, ModelSize
from pat_vllm.weights.inplace import InPlaceShards
from tests.models import random_model
from tests.support.mutation import mutated
from tests.test_experts import LAYOUTS, MODELS, ONE, WIDER, build, loaded
from tests.test_inplace import shared
from tests.test_weights import vllm_config_for

QWEN3 = {**MODEL_SHAPES["qwen3-30b-a3b"], "max_position_embeddings": 40960}
BIG = ModelShape.from_config(QWEN3)
PARAMETERS = 30_532_122_624
"""As the checkpoint of Qwen3-30B-A3B has them."""
EIGHT = Mixture(128, 768).layouts((1, 2, 4, 8), 8, "auto")


@pytest.fixture(autouse=True)
def current_vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(random_model(name)) / "config.json").read_text())
    return found


def parameter_bytes(model: nn.Module) -> int:
    """Of parameters that are in two modules, once."""
    sizes = {one.untyped_storage().data_ptr(): one.nbytes for one in model.parameters()}
    return sum(sizes.values())


def check_weights(names: list[str] = MODELS) -> None:
    for name in names:
        shape = ModelShape.from_config(config_of(name), dtype_bytes=4)
        vllm_config = vllm_config_for(random_model(name), tp=1)
        for layout in LAYOUTS:
            found = [
                parameter_bytes(build(vllm_config, layout.place_of(rank)))
                for rank in layout.ranks_of(0)
            ]
            expected = shape.weight_bytes(layout.tp, layout.experts == "ep")
            assert max(found) == expected, f"{name}, {layout}"


def test_weights_are_those_that_vllm_makes() -> None:
    """To the byte: of five classes, with the most that a rank of a layout has."""
    check_weights()


MISTAKES: dict[str, tuple[Callable[..., Any], dict[str, str], str]] = {
    "spread experts are cut": (
        ModelShape._expert_bytes,
        {"self._mlp(one.intermediate, 1)": "self._mlp(one.intermediate, tp)"},
        "qwen3_moe",
    ),
    "experts that do not divide": (
        ModelShape._expert_bytes,
        {"one.most_on_rank(tp)": "(one.count // tp)"},
        "qwen2_moe",
    ),
    "shared experts are forgotten": (
        ModelShape._expert_bytes,
        {"self._mlp(one.shared, tp) + ": ""},
        "glm4_moe",
    ),
    "the gate of shared experts is forgotten": (
        ModelShape._expert_bytes,
        {" + self.hidden * one.shared_gate": ""},
        "qwen2_moe",
    ),
    "routers are cut": (
        ModelShape._expert_bytes,
        {"one.count * self.dtype_bytes": "one.count // tp * self.dtype_bytes"},
        "mixtral",
    ),
    "the bias of the router's choice is forgotten": (
        ModelShape._expert_bytes,
        {"(self.hidden + 1)": "self.hidden"},
        "glm4_moe",
    ),
    "dense layers have experts": (
        ModelShape.weight_bytes,
        {"self.dense_layers *": "0 *"},
        "glm4_moe",
    ),
    "norms over all heads are forgotten": (
        ModelShape.weight_bytes,
        {"* self.wide_qk_norm": "* 0"},
        "olmoe",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_weights_are_seen(mistake: str) -> None:
    function, changes, name = MISTAKES[mistake]
    with mutated(function, changes), pytest.raises(AssertionError):
        check_weights([name])


def test_qwen3_30b_a3b() -> None:
    assert BIG.weight_bytes(1) == 2 * PARAMETERS
    experts = 128 * 3 * 2048 * 768 * 48 * 2
    cut, spread = (BIG.weight_bytes(8, kind) for kind in (False, True))
    assert cut == spread < (BIG.weight_bytes(1) - experts) + experts // 8
    assert BIG.resident_weights(1) * 2 == pytest.approx(BIG.weight_bytes(1), rel=1e-4)
    assert BIG.resident_weights(8, spread=True) == BIG.resident_weights(8)


# -------------------------------------------------------------------- tables of swaps


def swap_rows(layouts: tuple[Layout, ...], rank: int) -> int:
    """Rows of a device's tables for one layer of experts, from the swaps that the engine makes."""
    base = loaded(layouts[0].place_of(rank))
    models = [loaded(one.place_of(rank)) for one in layouts[1:]]
    strategy = shared(base, models, list(layouts), rank)
    assert isinstance(strategy, InPlaceShards)
    return sum(move.num_bytes for move in strategy._moves.values())


def layer_shape() -> ModelShape:
    """Of the layer that `loaded` makes, and next to nothing else."""
    return ModelShape.from_config(
        {
            "model_type": "mixtral",
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "vocab_size": 64,
            "max_position_embeddings": 64,
        },
        dtype_bytes=4,
    )


def check_tables(layouts: tuple[Layout, ...]) -> None:
    """A swap of rows of one expert is in one chunk here, and moves bytes in both directions."""
    shape = layer_shape()
    (experts, held), *_ = [one for one in shape._row_cuts(layouts[0]) if one[0].experts == "tp"]
    for rank in range(layouts[0].world_size):
        lengths = _swapped(experts, layouts, rank)
        moved = sum(2 * held * length * 32 * 4 for length in lengths)
        assert moved == swap_rows(layouts, rank)


@pytest.mark.parametrize(
    "layouts",
    [
        (ONE, *WIDER),
        (ONE, *(one for one in WIDER if one.experts == "ep")),
        tuple(one for one in WIDER if one.experts == "tp"),
        tuple(one for one in WIDER if one.experts == "ep"),
    ],
)
def test_tables_list_the_swaps_of_every_expert(layouts: tuple[Layout, ...]) -> None:
    check_tables(layouts)


def test_tables_of_30b_a3b() -> None:
    both, spread = BIG.swap_table_bytes(EIGHT), BIG.swap_table_bytes(EIGHT[::2])
    assert [str(one) for one in EIGHT[::2]] == ["tp1dp8", "tp2dp4ep", "tp4dp2ep", "tp8dp1ep"]
    assert 30e6 < both < 150e6
    dense = ModelShape.from_config(
        {**QWEN3, "model_type": "qwen3", "num_experts": 0, "intermediate_size": 768}
    )
    assert 0 < spread < dense.swap_table_bytes(EIGHT[::2])


# -------------------------------------------------------------------- a rank


def test_a_workspace_is_what_vllms_experts_ask_for() -> None:
    """Of one layer's shapes in every layout, and counted once, because layouts share it."""
    experts = TritonExperts.__new__(TritonExperts)
    for model in (BIG, ModelShape.from_config({**QWEN3, "moe_intermediate_size": 4096})):
        for layout in EIGHT:
            spread = layout.experts == "ep"
            one = model.experts
            assert one is not None
            width = one.intermediate if spread else one.intermediate // layout.tp
            sizes = (8192, 2 * width, model.hidden, one.per_token, one.count, one.count)
            shapes = experts.workspace_shapes(*sizes, None, MoEActivation.SILU)
            first, second, output = map(math.prod, shapes)
            found = 2 * (max(first, output) + second)
            assert model.expert_workspace_bytes(layout.tp, spread, 8192) == found


def engine(layouts: tuple[Layout, ...]) -> EngineShape:
    return EngineShape(layouts, pat=PATConfig(limits_per="replica"))


def test_layouts_share_the_workspace_and_the_groups() -> None:
    base, *others = all_buffers(BIG, engine(EIGHT))
    (found,) = [one for one in base if "experts" in one.name]
    assert found.device == 2 * 8192 * 8 * 2048 * 2
    assert not any("experts" in one.name for buffers in others for one in buffers)
    memory = rank_memory(BIG, engine(EIGHT), GPU(143771 * MiB))
    assert memory.communicators == communicator_bytes(2) + communicator_bytes(4)


def test_what_is_left_for_kv_on_80_gb() -> None:
    """The whole model at tp=1 leaves a tenth; half of it leaves half."""
    whole = rank_memory(BIG, engine(EIGHT), H100)
    half = rank_memory(BIG, engine(EIGHT[1::2]), H100)
    assert [one.tp for one in engine(EIGHT[1::2]).layouts] == [2, 4, 8]
    assert whole.weights == BIG.weight_bytes(1) + BIG.rotary_bytes
    assert half.weights == BIG.weight_bytes(2) + BIG.rotary_bytes
    assert 0 < whole.kv < 0.2 * H100.memory < 0.4 * H100.memory < half.kv


# -------------------------------------------------------------------- sizes from configs


def test_experts_of_a_config() -> None:
    sizes = {name: ModelSize.of(config_of(name)) for name in MODELS}
    experts = {name: size.experts for name, size in sizes.items()}
    assert all(one is not None and one.intermediate == 64 for one in experts.values())
    found = {name: (one.count, one.per_token) for name, one in experts.items() if one}
    assert found == {**dict.fromkeys(MODELS, (8, 2)), "qwen2_moe": (6, 2)}
    for name, one in experts.items():
        mixture = Mixture.from_config(config_of(name))
        assert one is not None and mixture == Mixture(one.count, one.intermediate)
        assert (one.shared, one.shared_gate) == {
            "qwen2_moe": (256, True),
            "glm4_moe": (64, False),
        }.get(name, (0, False))
    assert {name: size.dense_layers for name, size in sizes.items()} == {
        **dict.fromkeys(MODELS, 0),
        "glm4_moe": 1,
    }


def test_layers_without_experts() -> None:
    def layers(**fields: Any) -> int:
        size = ModelSize.of({**QWEN3, **fields})
        assert size.experts is not None
        return size.experts.layers

    assert layers() == 48
    assert layers(mlp_only_layers=[0, 5, 47]) == 45
    assert layers(decoder_sparse_step=2) == 24
    assert layers(decoder_sparse_step=2, mlp_only_layers=[0, 1]) == 23
    assert layers(model_type="glm4_moe", first_k_dense_replace=3) == 45


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 512}, "has kv_lora_rank: latent attention cannot be modelled"),
        ({"model_type": "gpt_oss"}, "has num_experts: .* model_type 'gpt_oss' .*qwen3_moe"),
        ({"num_experts_per_tok": None}, "with num_experts_per_tok"),
    ],
)
def test_what_cannot_be_modelled_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSize.of({**QWEN3, **fields})


def test_what_ranks_can_share() -> None:
    small = ModelSize.of({**QWEN3, "intermediate_size": 6})
    assert small.divides(8), "no layer has an MLP"
    assert not ModelSize.of({**QWEN3, "intermediate_size": 6, "mlp_only_layers": [0]}).divides(8)
    shared = {**QWEN3, "shared_expert_intermediate_size": 12}
    assert ModelSize.of(shared).divides(4) and not ModelSize.of(shared).divides(8)

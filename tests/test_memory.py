"""What an engine takes of a GPU, computed; what of that its KV cache is sized by; the bars."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.config import PATConfig
from pat_vllm.kv_transfer.plan import ROUNDS
from pat_vllm.layout import Layout
from pat_vllm.memory import buffers as buffers_module
from pat_vllm.memory.buffers import EngineShape, all_buffers, runner_buffers
from pat_vllm.memory.model import ModelShape
from pat_vllm.memory.rank_memory import H100, RankMemory, communicator_bytes, rank_memory
from pat_vllm.memory.sizing import Measured, kv_cache_bytes, staged_share
from tests.support.mutation import mutated

GB = 10**9
LAYOUTS = tuple(Layout.of(tp, 8) for tp in (1, 2, 4, 8))

# From the `config.json` of the published checkpoints.
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "Qwen3-32B": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}
MODELS = {name: ModelShape.from_config(config) for name, config in CONFIGS.items()}
PARAMETERS = {"Llama-3.1-8B": 8_030_261_248, "Qwen3-32B": 32_762_123_264}
"""As the checkpoints have them."""


AS_GIVEN = PATConfig(limits_per="replica")
H100_DEFAULTS: dict[str, Any] = {"max_num_seqs": 1024, "max_num_batched_tokens": 16384}


def pat(**options: Any) -> EngineShape:
    """Layouts that run as many requests as given each, if no option says otherwise."""
    return EngineShape(LAYOUTS, **{"pat": AS_GIVEN, **options})


def static(tp: int = 1, **options: Any) -> EngineShape:
    """Stock vLLM, or one of eight stock engines."""
    return EngineShape((Layout(tp, 1),), **options | {"pat": AS_GIVEN})


# -------------------------------------------------------------------- sizing the KV cache


@st.composite
def devices(draw: st.DrawFn) -> tuple[int, list[Measured], int, list[int]]:
    """Memory that is free in the end, and what was measured while layouts took some of it."""
    sizes = st.integers(0, 8 * GB)
    free = draw(st.integers(80 * GB, 200 * GB))
    layouts: list[Measured] = []
    taken_later = 0
    for _ in range(draw(st.integers(1, 4))):
        activations = draw(sizes)
        layouts.insert(0, Measured(free + taken_later - activations, activations))
        taken_later += draw(sizes)
    buffers = [draw(st.integers(0, GB)) for _ in layouts]
    return free, layouts, draw(sizes), buffers


@given(devices(), st.floats(0, 3))
def test_steps_and_switches_have_room_and_nothing_else_is_kept_free(
    device: tuple[int, list[Measured], int, list[int]], staged: float
) -> None:
    free, layouts, graphs, buffers = device
    kv = kv_cache_bytes(layouts, graphs, buffers, staged)
    left = free - graphs - (sum(buffers) - max(buffers)) - kv
    assert -1000 < left - max(kv * staged, *(one.activations for one in layouts), 0) < 1000


def test_one_layout_is_as_vllm_has_it() -> None:
    assert kv_cache_bytes([Measured(50 * GB, GB)], GB, [GB], staged=0) == 49 * GB
    assert staged_share(LAYOUTS[:1], num_kv_heads=8, num_layers=32) == 0


@pytest.mark.parametrize("kv_heads, sent", [(8, 1), (16, 1), (4, 2), (2, 4), (1, 8)])
def test_a_layer_is_sent_to_each_rank_with_the_same_heads(kv_heads: int, sent: int) -> None:
    share = staged_share(LAYOUTS, kv_heads, num_layers=10)
    assert share == pytest.approx((sent + 2 / ROUNDS) / 10)


# -------------------------------------------------------------------- the arithmetic


def check_weights() -> None:
    for name, model in MODELS.items():
        # The vocabularies are multiples of 64, so nothing is padded.
        assert model.weight_bytes(1) == 2 * PARAMETERS[name]
        norms = (2 * model.layers + 1) * model.hidden * 2
        norms += model.layers * 2 * model.head_dim * 2 * model.qk_norm
        for tp in (2, 4, 8):
            assert (model.weight_bytes(tp) - norms) * tp == model.weight_bytes(1) - norms


def check_kv() -> None:
    assert MODELS["Llama-3.1-8B"].kv_bytes_per_token(1) == 131072
    assert MODELS["Qwen3-32B"].kv_bytes_per_token(1) == 262144
    assert MODELS["Qwen3-32B"].kv_bytes_per_token(8) == 262144 // 8
    assert MODELS["Qwen3-32B"].kv_bytes_per_token(16) == 262144 // 8, "heads are replicated"


def check_shared() -> None:
    """What layouts share is there once; a derived layout has tens of MB."""
    cases = itertools.product(("FLASH_ATTN", "FLASHINFER"), ("V1", "V2"), (0, 8))
    for attention, runner, drafts in cases:
        options: Any = {"attention": attention, "runner": runner, "num_speculative_tokens": drafts}
        check_the_largest_is_shared(**options)
        base, *others = all_buffers(MODELS["Qwen3-32B"], pat(**options))
        alone = runner_buffers(MODELS["Qwen3-32B"], static(**options), Layout(1, 1))
        assert sorted(base, key=repr) == sorted(alone, key=repr)
        for one in others:
            assert 0 < sum(buffer.device for buffer in one) < 30e6
            assert sum(buffer.pinned for buffer in one) < 4e6


def check_the_largest_is_shared(**options: Any) -> None:
    """Layouts that run more requests have the larger buffers, of which the others use a part."""
    model, engine = MODELS["Qwen3-32B"], pat(pat=PATConfig(), **options)
    every = [runner_buffers(model, engine, layout) for layout in LAYOUTS]
    base, *others = all_buffers(model, engine)
    found = {one.name: one for one in base if one.shared}
    assert found and all(not one.shared for buffers in others for one in buffers)
    assert {one.name for one in base} == {one.name for one in every[0]}
    for name, one in found.items():
        sizes = [each.on_cpu for buffers in every for each in buffers if each.name == name]
        assert len(sizes) == len(LAYOUTS) and one.on_cpu == max(sizes)


def check_pinned() -> None:
    """Token ids of Model Runner V2: 4 bytes for each token of each request.

    With drafts they are on the device, beside the bits of grammars for each draft.
    """
    (stock,) = all_buffers(MODELS["Llama-3.1-8B"], static())
    pinned = sum(buffer.pinned for buffer in stock)
    assert 0 < pinned - 256 * 32768 * 4 < 400_000
    (drafting,) = all_buffers(MODELS["Llama-3.1-8B"], static(num_speculative_tokens=8))
    assert sum(buffer.pinned for buffer in drafting) < 400_000
    moved = sum(buffer.device for buffer in drafting) - sum(buffer.device for buffer in stock)
    assert 0 < moved - 256 * 32768 * 4 - 256 * 8 * (128256 // 8) < 600_000


def test_weights() -> None:
    check_weights()


def test_kv() -> None:
    check_kv()


def test_what_layouts_share() -> None:
    check_shared()


def test_pinned_memory() -> None:
    check_pinned()


MISTAKES: dict[str, tuple[Callable[[], None], Callable[..., Any], dict[str, str]]] = {
    "a dtype's bytes are forgotten": (
        check_weights,
        ModelShape.weight_bytes,
        {") * self.dtype_bytes": ")"},
    ),
    "the head is forgotten": (
        check_weights,
        ModelShape.weight_bytes,
        {"matrices = 1 if self.tied else 2": "matrices = 1"},
    ),
    "norms are cut": (
        check_weights,
        ModelShape.weight_bytes,
        {"of_layer += 2 * self.hidden\n": "of_layer += 2 * self.hidden // tp\n"},
    ),
    "norms of queries and keys are forgotten": (
        check_weights,
        ModelShape.weight_bytes,
        {"2 * self.head_dim * self.qk_norm": "0"},
    ),
    "keys without values": (
        check_kv,
        ModelShape.kv_bytes_per_token,
        {"2 * self.layers": "self.layers"},
    ),
    "heads are cut beyond one": (
        check_kv,
        ModelShape._kv_heads_per_rank,
        {"max(1, self.kv_heads // tp)": "self.kv_heads / tp"},
    ),
    "a shared buffer for each layout": (check_shared, all_buffers, {"if not one.shared": ""}),
    "the smallest is shared": (check_shared, all_buffers, {"max(alike": "min(alike"}),
    "embeddings for each layout": (
        check_shared,
        buffers_module._v1_buffers,
        {"model.dtype_bytes, shared=True": "model.dtype_bytes"},
    ),
    "a workspace for each layout": (
        check_shared,
        buffers_module._attention_buffers,
        {"device=workspace, shared=True": "device=workspace"},
    ),
    "a bitmask of grammars for each layout": (
        check_shared,
        buffers_module._v2_buffers,
        {"* mask, shared=True": "* mask"},
    ),
    "tokens of the drafter for each layout": (
        check_shared,
        buffers_module._v1_drafts,
        {"engine.max_model_len, shared=True": "engine.max_model_len"},
    ),
    "token ids are pinned for a drafter on the device": (
        check_pinned,
        buffers_module._v2_buffers,
        {"pinned=not drafts": "pinned=True"},
    ),
    "token ids as large as their dtype's name": (
        check_pinned,
        buffers_module._Made.staged,
        {"4 * count": "8 * count"},
    ),
    "pinned memory is counted as the device's": (
        check_pinned,
        buffers_module._Made.staged,
        {"pinned=size + writes": "device=size, pinned=writes"},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_arithmetic_are_seen(mistake: str) -> None:
    check, function, changes = MISTAKES[mistake]
    with mutated(function, changes), pytest.raises(AssertionError):
        check()


def test_tables_of_swaps_are_small() -> None:
    for model in MODELS.values():
        assert 0 < model.swap_table_bytes(LAYOUTS) < 60e6
        assert model.swap_table_bytes(LAYOUTS[:1]) == 0


# -------------------------------------------------------------------- the bars


def added(
    model: ModelShape, groups: bool = True, base_tp: int = 1, **options: Any
) -> tuple[RankMemory, RankMemory, float]:
    """What a static engine and PAT's take, and by what part PAT's KV cache is smaller.

    Args:
        groups: count the communicators of narrower layouts, which stock vLLM has at that tp.
        base_tp: of PAT's engine, and the tp of the static one.
    """
    layouts = tuple(layout for layout in LAYOUTS if layout.tp >= base_tp)
    engine = rank_memory(model, EngineShape(layouts, **{"pat": AS_GIVEN, **options}), H100)
    stock = rank_memory(model, static(base_tp, **options), H100)
    assert engine.weights == stock.weights
    ignored = 0 if groups else engine.communicators
    return stock, engine, (stock.kv - engine.kv - ignored) / stock.kv


def check_bar(name: str, **options: Any) -> None:
    *_, share = added(MODELS[name], groups=False, **options)
    assert 0 <= share <= 0.03


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("attention", ["FLASH_ATTN", "FLASHINFER"])
@pytest.mark.parametrize("tokens", [2048, 8192, 16384])
def test_pat_takes_at_most_three_percent_of_the_kv_cache(
    name: str, runner: Any, attention: Any, tokens: int
) -> None:
    """Beside weights, CUDA graphs, and the communicators that a tp has in stock vLLM, too."""
    options: Any = {"runner": runner, "attention": attention, "max_num_batched_tokens": tokens}
    check_bar(name, **options)


def check_bar_of_growing_limits(name: str, seqs: int, tokens: int, **options: Any) -> None:
    """Against stock vLLM that runs as many requests as PAT's layout that runs most."""
    engine = EngineShape(LAYOUTS, max_num_seqs=seqs, max_num_batched_tokens=tokens, **options)
    most = [engine.limits(layout) for layout in LAYOUTS]
    stock = static(
        max_num_seqs=max(one.max_num_seqs for one in most),
        max_num_batched_tokens=max(one.max_num_batched_tokens for one in most),
        **options,
    )
    ours, theirs = (rank_memory(MODELS[name], one, H100) for one in (engine, stock))
    assert ours.kv + ours.communicators >= 0.97 * theirs.kv
    assert ours.pinned <= 1.25 * theirs.pinned


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("attention", ["FLASH_ATTN", "FLASHINFER"])
@pytest.mark.parametrize("seqs, tokens", [(1024, 16384), (256, 8192), (256, 2048), (64, 8192)])
def test_the_bar_holds_where_limits_grow_with_the_ranks(
    name: str, runner: Any, attention: Any, seqs: int, tokens: int
) -> None:
    check_bar_of_growing_limits(name, seqs, tokens, runner=runner, attention=attention)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("attention", ["FLASH_ATTN", "FLASHINFER"])
def test_with_h100s_defaults_nothing_grows(name: str, runner: Any, attention: Any) -> None:
    """So the bar is that against stock vLLM with the same options."""
    options: Any = {"runner": runner, "attention": attention, **H100_DEFAULTS}
    grown, given = (pat(pat=one, **options) for one in (PATConfig(), AS_GIVEN))
    assert all_buffers(MODELS[name], grown) == all_buffers(MODELS[name], given)
    check_bar(name, pat=PATConfig(), **options)


@pytest.mark.parametrize(
    "name, base_tp, at_most",
    [("Llama-3.1-8B", 1, 0.03), ("Qwen3-32B", 2, 0.04), ("Qwen3-32B", 1, 0.1)],
)
def test_what_growing_limits_take(name: str, base_tp: int, at_most: float) -> None:
    """Of 256 requests a rank, in the KV cache: of Qwen3-32B at tp=1 there is little."""
    options: Any = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "pat": PATConfig()}
    *_, share = added(MODELS[name], groups=False, base_tp=base_tp, **options)
    assert at_most / 4 < share <= at_most
    print(f"{name}, base_tp={base_tp}: KV cache smaller by {share:.2%}")


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("name", MODELS)
def test_pinned_memory_is_at_most_a_quarter_more(name: str, runner: Any) -> None:
    engine = rank_memory(MODELS[name], pat(runner=runner), H100)
    for tp in (1, 8):
        stock = rank_memory(MODELS[name], static(tp, runner=runner), H100)
        assert engine.pinned <= 1.25 * stock.pinned


BAR_MISTAKES: dict[str, tuple[dict[str, Any], Callable[..., Any], dict[str, str]]] = {
    "a layer is staged in both directions": (
        {},
        staged_share,
        {"2 / ROUNDS": "1"},
    ),
    "each layout has penalty counters": (
        {},
        buffers_module._v2_buffers,
        {"(model.vocab + mask), shared=True": "(model.vocab + mask)"},
    ),
    "each layout has an attention workspace": (
        {"attention": "FLASHINFER"},
        buffers_module._attention_buffers,
        {"device=workspace, shared=True": "device=workspace"},
    ),
}


@pytest.mark.parametrize("mistake", BAR_MISTAKES)
def test_what_would_miss_the_bar(mistake: str) -> None:
    """Each of what layouts share is needed for it."""
    options, function, changes = BAR_MISTAKES[mistake]

    def check() -> None:
        for name in MODELS:
            check_bar(name, **options)

    check()
    with mutated(function, changes), pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize(
    "name, base_tp, at_most",
    [("Llama-3.1-8B", 1, 0.03), ("Qwen3-32B", 2, 0.01), ("Qwen3-32B", 1, 0.05)],
)
def test_with_communicators(name: str, base_tp: int, at_most: float) -> None:
    """At tp=1, Qwen3-32B leaves so little for KV that communicators alone take more than 3%."""
    stock, engine, share = added(MODELS[name], base_tp=base_tp)
    assert at_most - 0.01 < share <= at_most
    assert communicator_bytes(1) == 0
    groups = [layout.tp for layout in LAYOUTS[:-1] if layout.tp >= base_tp]
    assert engine.communicators == sum(map(communicator_bytes, groups))
    print(f"{name}, base_tp={base_tp}:")
    for title, one in (("static", stock), ("PAT", engine)):
        sizes = {key: round(value / GB, 3) for key, value in vars(one).items()}
        print(f"  {title}: {sizes}, {one.kv // MODELS[name].kv_bytes_per_token(base_tp)} tokens")
    own = added(MODELS[name], groups=False, base_tp=base_tp)[-1]
    print(f"  KV cache smaller by {share:.2%}, {own:.2%} without communicators")

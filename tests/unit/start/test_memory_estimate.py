"""What an engine takes of a GPU, estimated; what of that its KV cache is sized by; the bars.

With real engines and vLLM's own objects the arithmetic is compared in tests/engine/test_memory.py
and tests/vllm/start/memory/test_mixtures.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.advice.batches import sampled_batches
from pat_vllm.advice.engines import modelled_engines
from pat_vllm.cli.advise import AdviseOptions
from pat_vllm.config import PATConfig
from pat_vllm.kv_transfer.plan import ROUNDS
from pat_vllm.layout import Experts, Layout
from pat_vllm.modelled.gpus import GPUS, Device
from pat_vllm.models.checkpoint import named_config
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.start.buffers import EngineShape, all_buffers, runner_buffers
from pat_vllm.start.memory_estimate import (
    Measured,
    RankMemory,
    communicator_bytes,
    estimate,
    exchange_bytes,
    flashinfer_bytes,
    kv_cache_bytes,
    staged_share,
    static_engine,
)
from tests.support.engine_shapes import engine_shape
from tests.support.modelled_profile import modelled_profile

GB = 10**9
LAYOUTS = tuple(Layout.of(tp, 8) for tp in (1, 2, 4, 8))
H100 = GPUS["H100"].device

LLAMA_8B, QWEN3_30B_A3B, QWEN3_32B = (
    ModelSize.of(MODEL_SHAPES[name]) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "qwen3-32b")
)
PARAMETERS = {LLAMA_8B: 8_030_261_248, QWEN3_32B: 32_762_123_264, QWEN3_30B_A3B: 30_532_122_624}
"""As the published checkpoints have them."""

AS_GIVEN = PATConfig(limits_per="replica")


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


@settings(max_examples=80)
@given(devices(), st.floats(0, 3), st.integers(0, GB))
def test_steps_and_switches_have_room_and_nothing_else_is_kept_free(
    device: tuple[int, list[Measured], int, list[int]], staged: float, gathered: int
) -> None:
    free, layouts, graphs, buffers = device
    kv = kv_cache_bytes(layouts, graphs, buffers, staged, gathered)
    left = free - graphs - (sum(buffers) - max(buffers)) - kv
    switch = kv * staged + gathered
    assert -1000 < left - max(switch, *(layout.activations for layout in layouts), 0) < 1000


@pytest.mark.parametrize("kv_heads, sent", [(16, 1), (8, 1), (4, 2), (1, 8)])
def test_a_layer_is_sent_to_each_rank_with_the_same_heads(kv_heads: int, sent: int) -> None:
    share = staged_share(LAYOUTS, kv_heads, num_regions=10)
    assert share == pytest.approx((sent + 2 / ROUNDS) / 10)


# -------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("model", PARAMETERS, ids=["8B", "32B", "30B-A3B"])
def test_weights_are_those_of_the_checkpoint(model: ModelSize) -> None:
    assert model.weight_bytes(1) == pytest.approx(2 * PARAMETERS[model], rel=1e-4)
    for tp in (2, 4):
        assert model.weight_bytes(tp) == pytest.approx(2 * PARAMETERS[model] / tp, rel=2e-3)
        assert model.weight_bytes(tp, spread=True) == model.weight_bytes(tp)


def test_tied_embeddings_are_there_once_and_vocabularies_are_padded() -> None:
    tied = replace(LLAMA_8B, tied=True)
    assert LLAMA_8B.weight_bytes(2) - tied.weight_bytes(2) == 128256 * 4096
    odd = replace(tied, vocab=128256 - 63)
    assert odd.weight_bytes(1) == tied.weight_bytes(1)


def test_kv_of_a_token() -> None:
    assert LLAMA_8B.kv_bytes_per_token(1) == 131072
    assert QWEN3_32B.kv_bytes_per_token(1) == 262144
    assert QWEN3_32B.kv_bytes_per_token(8) == 262144 // 8
    assert QWEN3_32B.kv_bytes_per_token(16) == 262144 // 8, "heads are replicated"


def test_a_replica_holds_as_many_latent_vectors_at_any_tp() -> None:
    """So what an engine holds falls with tp, where of other models it stays."""
    v2_lite = ModelSize.of(MODEL_SHAPES["deepseek-v2-lite"])
    assert v2_lite.kv_bytes_per_token(1) == v2_lite.kv_bytes_per_token(8) == 27 * 576 * 2
    assert v2_lite.rotary_bytes == 163840 * 64 * 2
    latent, heads = (estimate(model, pat(), H100).kv_tokens for model in (v2_lite, LLAMA_8B))
    assert {*latent} == {1, 2, 4, 8} and len({*latent.values()}) == 1
    assert all(heads[tp] == pytest.approx(tp * heads[1], rel=1e-3) for tp in heads)
    # Earlier parts of prompts are gathered in one buffer, of the layout with most requests.
    assert v2_lite.latent_workspace_bytes(1024, 16, 16) == 8 * 1024 * 576 * 2
    assert v2_lite.latent_workspace_bytes(128, 256, 16) == 4 * 256 * 16 * 576 * 2
    assert v2_lite.latent_workspace_bytes(32768, 256, 16) == (64 << 10) * 576 * 2
    assert LLAMA_8B.latent_workspace_bytes(32768, 256, 16) == 0
    base, *others = all_buffers(v2_lite, pat())
    sizes = [buffer.device for buffer in base if buffer.with_kv and buffer.shared]
    assert sizes == [(64 << 10) * 576 * 2]
    assert not [buffer for buffers in others for buffer in buffers if buffer.shared]


def test_states_of_linear_attention() -> None:
    """Those of Qwen3-Next, beside the KV of a quarter of its layers."""
    model = ModelSize.of(MODEL_SHAPES["qwen3-next-80b-a3b"])
    assert model.kv_bytes_per_token(1) == 12 * 2 * 2 * 256 * 2
    assert model.kv_bytes_per_token(4) == model.kv_bytes_per_token(2), "heads are replicated"
    of_layer = (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128) * 2
    assert model.state_bytes(1) == 36 * of_layer and model.state_bytes(8) == 36 * of_layer // 8
    # As vLLM sizes blocks: a multiple of 16 tokens whose KV in a layer takes what a state does.
    assert [model.block_size(tp, 16) for tp in (1, 2, 4, 8)] == [544, 544, 272, 144]
    wide = replace(model, linear=replace(model.linear, wide=True)) if model.linear else model
    assert [wide.block_size(tp, 16) for tp in (1, 2, 4, 8)] == [1056, 1056, 528, 272]
    assert LLAMA_8B.block_size(8, 16) == 16 and LLAMA_8B.state_bytes(1) == 0


@pytest.mark.parametrize(
    ("name", "cost"), [("qwen3-next-80b-a3b", (0.045, 0.067)), ("qwen3.5-35b-a3b", (0.081, 0.120))]
)
def test_what_one_size_of_blocks_costs(name: str, cost: tuple[float, float]) -> None:
    """Share of the contexts of 32K that a group of 4 or 8 ranks holds less of, in the same memory,
    because its blocks are as long as those of the base layout."""
    model = ModelSize.of(MODEL_SHAPES[name])
    layouts = tuple(Layout.of(tp, 8) for tp in (2, 4, 8))
    engine = EngineShape(layouts, max_model_len=32768, kv_cache_memory_bytes=40 << 30)
    tokens = estimate(model, engine, H100).kv_tokens
    for layout, lost in zip(layouts, (0.0, *cost), strict=True):
        alone = estimate(model, static_engine(engine, layout), H100).kv_tokens[layout.tp]
        assert 1 - tokens[layout.tp] / alone == pytest.approx(lost, abs=0.001)


@pytest.mark.parametrize("drafts", [0, 8])
@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("attention", ["FLASH_ATTN", "FLASHINFER"])
def test_what_layouts_share_is_there_once(attention: Any, runner: Any, drafts: int) -> None:
    """In the size that the layout with the most requests needs; others have tens of MB."""
    options: Any = {"attention": attention, "runner": runner, "num_speculative_tokens": drafts}
    base, *others = all_buffers(QWEN3_32B, pat(**options))
    alone = runner_buffers(QWEN3_32B, static(**options), Layout(1, 1))
    assert sorted(base, key=repr) == sorted(alone, key=repr)
    for buffers in others:
        assert 0 < sum(buffer.device for buffer in buffers) < 30e6
        assert sum(buffer.pinned for buffer in buffers) < 4e6

    growing = pat(pat=PATConfig(), **options)
    every = [runner_buffers(QWEN3_32B, growing, layout) for layout in LAYOUTS]
    base, *others = all_buffers(QWEN3_32B, growing)
    assert not any(buffer.shared for buffers in others for buffer in buffers)
    shared = [buffer for buffer in base if buffer.shared]
    largest = [max(alike, key=lambda buffer: buffer.on_cpu) for alike in zip(*every, strict=True)]
    assert shared == [buffer for buffer in largest if buffer.shared]
    assert sum(buffer.on_cpu for buffer in shared) > sum(
        buffer.on_cpu for buffer in every[0] if buffer.shared
    )


@pytest.mark.parametrize(("runner", "tables"), [("V1", 1), ("V2", 2)])
def test_longer_contexts_take_longer_block_tables(runner: Any, tables: int) -> None:
    """Too little beside the rest for engines of tests to show."""
    layout = Layout(1, 1)

    def of(tokens: int) -> int:
        engine = EngineShape((layout,), runner=runner, max_num_seqs=64, max_model_len=tokens)
        return sum(buffer.device for buffer in runner_buffers(LLAMA_8B, engine, layout))

    assert of(8192) - of(4096) == tables * 4 * 64 * 4096 // EngineShape((layout,)).block_size


def test_pinned_memory() -> None:
    """Token ids of Model Runner V2: 4 bytes for each token of each request.

    With drafts they are on the device, beside the bits of grammars for each draft.
    """
    stock, drafting = (
        estimate(LLAMA_8B, static(num_speculative_tokens=drafts), H100) for drafts in (0, 8)
    )
    assert (stock.pinned, drafting.pinned) == (256 * 32768 * 4, 0)
    assert drafting.buffers - stock.buffers == 256 * 32768 * 4 + 256 * 8 * (128256 // 8)


# -------------------------------------------------------------------- a rank


def added(
    model: ModelSize, base_tp: int = 1, **options: Any
) -> tuple[RankMemory, RankMemory, float]:
    """What a static engine and PAT's take, and by what part PAT's KV cache is smaller, but for the
    CUDA graphs and communicators of further layouts, which stock vLLM has at their tp.

    Args:
        base_tp: of PAT's engine, and the tp of the static one.
    """
    layouts = tuple(layout for layout in LAYOUTS if layout.tp >= base_tp)
    engine = estimate(model, EngineShape(layouts, **{"pat": AS_GIVEN, **options}), H100)
    stock = estimate(model, static(base_tp, **options), H100)
    assert engine.weights == stock.weights
    return stock, engine, 1 - (engine.kv + _of_layouts(engine) - _of_layouts(stock)) / stock.kv


def _of_layouts(memory: RankMemory) -> int:
    return memory.graphs + memory.communicators


@pytest.mark.parametrize("model", [LLAMA_8B, QWEN3_32B], ids=["8B", "32B"])
@pytest.mark.parametrize("seqs, tokens", [(1024, 16384), (256, 2048), (64, 8192)])
def test_pat_takes_at_most_three_percent_of_the_kv_cache(
    model: ModelSize, seqs: int, tokens: int
) -> None:
    """Beside weights, and the CUDA graphs and communicators that a tp has in stock vLLM, too.

    Where limits grow, stock vLLM runs as many requests as PAT's layout that runs most.
    """
    for runner, attention in itertools.product(("V1", "V2"), ("FLASH_ATTN", "FLASHINFER")):
        options: Any = {"runner": runner, "attention": attention}
        *_, share = added(model, max_num_batched_tokens=tokens, **options)
        assert 0 <= share <= 0.03, options
        engine = EngineShape(LAYOUTS, max_num_seqs=seqs, max_num_batched_tokens=tokens, **options)
        most = [engine.limits(layout) for layout in LAYOUTS]
        stock = static(
            max_num_seqs=max(limits.max_num_seqs for limits in most),
            max_num_batched_tokens=max(limits.max_num_batched_tokens for limits in most),
            **options,
        )
        ours, theirs = (estimate(model, shape, H100) for shape in (engine, stock))
        more = _of_layouts(ours) - _of_layouts(theirs)
        assert ours.kv + more >= 0.97 * theirs.kv, options
        assert ours.pinned <= 1.25 * theirs.pinned, options
        if seqs == 1024:  # vLLM's defaults on H100: nothing grows
            given_ = pat(max_num_seqs=seqs, max_num_batched_tokens=tokens, **options)
            assert all_buffers(model, engine) == all_buffers(model, given_)


@pytest.mark.parametrize(
    "model, base_tp", [(LLAMA_8B, 1), (QWEN3_32B, 2), (QWEN3_32B, 1)], ids=["8B", "32B", "32B at 1"]
)
def test_what_the_kv_cache_loses(model: ModelSize, base_tp: int) -> None:
    """By further layouts; by limits that grow with the ranks, of 256 requests a rank."""
    stock, engine, own = added(model, base_tp)
    assert communicator_bytes(2, GPUS["A40"].device) < communicator_bytes(2, H100)
    groups = [layout.tp for layout in LAYOUTS[:-1] if layout.tp >= max(2, base_tp)]
    narrow = sum(communicator_bytes(tp, H100) for tp in groups)
    flashinfer = sum(flashinfer_bytes(tp, H100) for tp in (2, 4, 8) if tp >= base_tp)
    assert engine.communicators == narrow + flashinfer + exchange_bytes(8)
    assert stock.communicators == flashinfer_bytes(base_tp, H100)
    _, most, grown = added(model, base_tp, pat=PATConfig())
    assert 0 <= own <= grown < 0.11 and stock.kv > engine.kv > most.kv


@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_the_layouts_of_a_mixture_share_its_workspace(kind: Experts) -> None:
    engine = EngineShape(LAYOUTS, pat=AS_GIVEN, experts=kind)
    base, *others = all_buffers(QWEN3_30B_A3B, engine)
    assert 2 * 8192 * 8 * 2048 * 2 in [buffer.device for buffer in base if buffer.shared]
    assert not any(buffer.shared for buffers in others for buffer in buffers)


def test_what_only_several_gpus_have() -> None:
    """FlashInfer's buffers with vLLM's limits, and few channels to each other rank; none on CPU."""
    assert flashinfer_bytes(2, H100) == 384 << 20 and flashinfer_bytes(1, H100) == 0
    assert flashinfer_bytes(2, GPUS["A40"].device) == 0
    assert exchange_bytes(8) == 252 << 20 and exchange_bytes(2) == 36 << 20
    on_cpu = estimate(LLAMA_8B, pat(attention="CPU_ATTN"), Device(64 << 30))
    assert on_cpu.communicators == sum(communicator_bytes(tp, Device(64 << 30)) for tp in (2, 4))
    assert communicator_bytes(2, GPUS["MI300X"].device) == communicator_bytes(2, GPUS["A40"].device)


def test_graphs_of_a_layout() -> None:
    """In vLLM's published log, of Qwen3-8B with 51 piecewise and 35 whole graphs."""
    qwen3_8b = replace(LLAMA_8B, layers=36)
    graphs = estimate(qwen3_8b, static(), H100).graphs
    assert graphs / 2**30 == pytest.approx(0.52, abs=0.02)
    assert estimate(qwen3_8b, pat(), H100).graphs == 4 * graphs
    assert estimate(qwen3_8b, pat(num_speculative_tokens=3), H100).graphs > 4 * graphs
    assert estimate(qwen3_8b, pat(enforce_eager=True), H100).graphs == 0


def test_copies_of_weights_take_memory_of_each_layout() -> None:
    copies = estimate(LLAMA_8B, pat(weights="materialized"), H100)
    shards = sum(LLAMA_8B.weight_bytes(layout.tp) for layout in LAYOUTS)
    assert copies.weights == shards + LLAMA_8B.rotary_bytes
    assert copies.swap_tables == 0 < estimate(LLAMA_8B, pat(), H100).swap_tables < 20e6


def test_kv_cache_as_a_user_says() -> None:
    memory = estimate(LLAMA_8B, pat(kv_cache_memory_bytes=16 * 131072 + 1), H100)
    assert memory.kv == 16 * 131072 + 1 and memory.kv_tokens == {1: 16, 2: 32, 4: 64, 8: 128}
    none = estimate(LLAMA_8B, pat(gpu_memory_utilization=0.1), H100)
    assert none.kv < 0 and set(none.kv_tokens.values()) == {0}


# -------------------------------------------------------------------- who else says it


def measured_by_a_worker(model: ModelSize, engine: EngineShape, gpu: str) -> int:
    """The KV cache of an engine whose rank allocates what its checkpoint and layouts take.

    Its layouts are measured one after another, the base layout last (`PATGPUWorker`).
    """
    device, (base, *_) = GPUS[gpu].device, engine.layouts
    buffers = all_buffers(model, engine)
    used = 2 * PARAMETERS[model] // base.tp
    used += sum(b.device for of_layout in buffers for b in of_layout if not b.with_kv)
    narrow = {layout.tp for layout in engine.layouts if layout.replicas > 1} - {1}
    used += sum(communicator_bytes(tp, device) for tp in narrow)
    used += sum(flashinfer_bytes(tp, device) for tp in {layout.tp for layout in engine.layouts})
    used += exchange_bytes(base.world_size) if len(engine.layouts) > 1 else 0
    measured = []
    for layout in reversed(engine.layouts):
        limits = engine.limits(layout)
        step = model.step_bytes(layout.tp, limits.max_num_batched_tokens, limits.max_num_seqs)
        measured.append(
            Measured(int(engine.gpu_memory_utilization * device.memory) - used - step, step)
        )
    graphs = [
        estimate(model, static_engine(engine, layout), device).graphs for layout in engine.layouts
    ]
    late = [sum(b.device for b in of_layout if b.with_kv) for of_layout in buffers]
    share = staged_share(engine.layouts, model.kv_heads, model.layers)
    return kv_cache_bytes(measured, sum(graphs), late, share)


@pytest.mark.parametrize("gpu", ["A40", "H100", "H200"])
@pytest.mark.parametrize(
    "name, model",
    [("llama-3.1-8b", LLAMA_8B), ("qwen3-30b-a3b", QWEN3_30B_A3B)],
    ids=["8B", "30B-A3B"],
)
def test_profiles_and_advise_grant_what_an_engine_has(
    name: str, model: ModelSize, gpu: str
) -> None:
    """PAT's KV in every layout, to 2% of what a worker would measure; and static engines'."""
    for base in (1, 2, 4):
        profile = modelled_profile(name, gpu, 8, layouts=[tp for tp in (1, 2, 4, 8) if tp >= base])
        if profile.layouts[0].tp != base:
            assert (base, gpu, model) == (1, "A40", QWEN3_30B_A3B), "all experts are too large"
            continue
        sizes = tuple(layout.tp for layout in profile.layouts)
        options, given = PATConfig(base_tp=base, layouts=sizes), {"max_model_len": 32768}
        shape, _ = engine_shape(MODEL_SHAPES[name], options, 8, given, GPUS[gpu].device)
        assert shape.layouts == profile.layouts
        assert estimate(model, shape, GPUS[gpu].device).kv_tokens == profile.kv_tokens
        kv = measured_by_a_worker(model, shape, gpu)
        for tp, granted in profile.kv_tokens.items():
            assert granted * model.kv_bytes_per_token(tp) == pytest.approx(kv, rel=0.02)
    asked = AdviseOptions(name, gpu, 8, responses=16, max_tokens=256)
    batches, longest = sampled_batches(asked, None, 0.0)
    advised = modelled_engines(asked, named_config(name), batches[0], 0.0, longest)
    shape = EngineShape((), max_model_len=longest, link=GPUS[gpu].link)
    engines = [
        (each.layout, each.kv_tokens, static_engine(shape, each.layout)) for each in advised.static
    ]
    for layout in advised.planner.layouts:
        room, _ = advised.planner.room(layout)
        ours = replace(shape, layouts=advised.planner.layouts)
        engines.append((layout, room // layout.replicas, ours))
    for layout, granted, engine in engines:
        kv = granted * model.kv_bytes_per_token(layout.tp)
        assert kv == pytest.approx(measured_by_a_worker(model, engine, gpu), rel=0.02)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_static_engines_have_more_kv_than_pats(name: str) -> None:
    ours, alone = (modelled_profile(name, "H200", 8, static=static) for static in (False, True))
    assert ours.layouts == alone.layouts and alone.key["static"] and "static" not in ours.key
    kv_heads, base = ModelSize.of(MODEL_SHAPES[name]).kv_heads, ours.layouts[0].tp
    assert base == (2 if name == "qwen3-next-80b-a3b" else 1), "where the weights fit"
    for tp in (layout.tp for layout in ours.layouts):
        more = min(tp, kv_heads) / min(base, kv_heads)
        assert ours.kv_tokens[tp] == pytest.approx(more * ours.kv_tokens[base], rel=1e-3)
        assert ours.kv_tokens[tp] < alone.kv_tokens[tp]

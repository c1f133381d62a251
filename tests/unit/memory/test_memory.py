"""What an engine takes of a GPU, computed; what of that its KV cache is sized by; the bars.

`pytest -s` prints what docs/results.md says of the KV cache. With real engines and vLLM's own
objects the arithmetic is compared in tests/engine/test_memory.py and
tests/vllm/memory/test_mixtures.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.config import PATConfig
from pat_vllm.kv_transfer.plan import ROUNDS
from pat_vllm.layout import Layout
from pat_vllm.memory.buffers import EngineShape, all_buffers, pinned_bytes, runner_buffers
from pat_vllm.memory.model import ModelShape
from pat_vllm.memory.rank_memory import GPU, H100, RankMemory, communicator_bytes, rank_memory
from pat_vllm.memory.sizing import Measured, kv_cache_bytes, staged_share
from pat_vllm.mixture import Mixture
from pat_vllm.model_size import MODEL_SHAPES

GB = 10**9
LAYOUTS = tuple(Layout.of(tp, 8) for tp in (1, 2, 4, 8))
BOTH_KINDS = Mixture(128, 768).layouts((1, 2, 4, 8), 8, "auto")

# From the `config.json` of the published checkpoints.
LLAMA_8B, QWEN3_30B_A3B = (
    ModelShape.from_config({**MODEL_SHAPES[name], "max_position_embeddings": positions})
    for name, positions in (("llama-3.1-8b", 131072), ("qwen3-30b-a3b", 40960))
)
QWEN3_32B = ModelShape.from_config(
    {
        **MODEL_SHAPES["qwen3-14b"],
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "max_position_embeddings": 40960,
    }
)
PARAMETERS = {LLAMA_8B: 8_030_261_248, QWEN3_32B: 32_762_123_264, QWEN3_30B_A3B: 30_532_122_624}
"""As the checkpoints have them."""
NAMES = {LLAMA_8B: "Llama-3.1-8B", QWEN3_32B: "Qwen3-32B"}
DENSE = pytest.mark.parametrize("model", NAMES, ids=NAMES.get)

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
@given(devices(), st.floats(0, 3))
def test_steps_and_switches_have_room_and_nothing_else_is_kept_free(
    device: tuple[int, list[Measured], int, list[int]], staged: float
) -> None:
    free, layouts, graphs, buffers = device
    kv = kv_cache_bytes(layouts, graphs, buffers, staged)
    left = free - graphs - (sum(buffers) - max(buffers)) - kv
    assert -1000 < left - max(kv * staged, *(one.activations for one in layouts), 0) < 1000


@pytest.mark.parametrize("kv_heads, sent", [(16, 1), (8, 1), (4, 2), (1, 8)])
def test_a_layer_is_sent_to_each_rank_with_the_same_heads(kv_heads: int, sent: int) -> None:
    share = staged_share(LAYOUTS, kv_heads, num_layers=10)
    assert share == pytest.approx((sent + 2 / ROUNDS) / 10)


# -------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("model", PARAMETERS, ids=["8B", "32B", "30B-A3B"])
def test_weights_are_those_of_the_checkpoint_and_all_but_norms_and_routers_are_cut(
    model: ModelShape,
) -> None:
    """The vocabularies are multiples of 64, so nothing is padded."""
    assert model.weight_bytes(1) == 2 * PARAMETERS[model]
    whole = (
        2 * model.layers + 1
    ) * model.hidden + 2 * model.layers * model.head_dim * model.qk_norm
    if model.experts is not None:
        whole += model.layers * model.hidden * model.experts.count
    for tp in (2, 4):
        cut = model.weight_bytes(tp) - 2 * whole
        assert cut * tp == model.weight_bytes(1) - 2 * whole
        assert model.weight_bytes(tp, spread=True) == model.weight_bytes(tp)


def test_kv_of_a_token() -> None:
    assert LLAMA_8B.kv_bytes_per_token(1) == 131072
    assert QWEN3_32B.kv_bytes_per_token(1) == 262144
    assert QWEN3_32B.kv_bytes_per_token(8) == 262144 // 8
    assert QWEN3_32B.kv_bytes_per_token(16) == 262144 // 8, "heads are replicated"


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
    shared = {buffer.name: buffer for buffer in base if buffer.shared}
    assert shared and not any(buffer.shared for buffers in others for buffer in buffers)
    assert {buffer.name for buffer in base} == {buffer.name for buffer in every[0]}
    for name, buffer in shared.items():
        sizes = [one.on_cpu for buffers in every for one in buffers if one.name == name]
        assert len(sizes) == len(LAYOUTS) and buffer.on_cpu == max(sizes)


def test_pinned_memory() -> None:
    """Token ids of Model Runner V2: 4 bytes for each token of each request.

    With drafts they are on the device, beside the bits of grammars for each draft.
    """
    stock = all_buffers(LLAMA_8B, static())
    assert 0 < pinned_bytes(stock) - 256 * 32768 * 4 < 400_000
    drafting = all_buffers(LLAMA_8B, static(num_speculative_tokens=8))
    assert pinned_bytes(drafting) < 400_000
    more = sum(buffer.device for buffer in drafting[0]) - sum(buffer.device for buffer in stock[0])
    assert 0 < more - 256 * 32768 * 4 - 256 * 8 * (128256 // 8) < 600_000


# -------------------------------------------------------------------- a rank


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


@DENSE
@pytest.mark.parametrize("seqs, tokens", [(1024, 16384), (256, 2048), (64, 8192)])
def test_pat_takes_at_most_three_percent_of_the_kv_cache(
    model: ModelShape, seqs: int, tokens: int
) -> None:
    """Beside weights, CUDA graphs, and the communicators that a tp has in stock vLLM, too.

    Where limits grow, stock vLLM runs as many requests as PAT's layout that runs most.
    """
    for runner, attention in itertools.product(("V1", "V2"), ("FLASH_ATTN", "FLASHINFER")):
        options: Any = {"runner": runner, "attention": attention}
        *_, share = added(model, groups=False, max_num_batched_tokens=tokens, **options)
        assert 0 <= share <= 0.03, options
        engine = EngineShape(LAYOUTS, max_num_seqs=seqs, max_num_batched_tokens=tokens, **options)
        most = [engine.limits(layout) for layout in LAYOUTS]
        stock = static(
            max_num_seqs=max(one.max_num_seqs for one in most),
            max_num_batched_tokens=max(one.max_num_batched_tokens for one in most),
            **options,
        )
        ours, theirs = (rank_memory(model, one, H100) for one in (engine, stock))
        assert ours.kv + ours.communicators >= 0.97 * theirs.kv, options
        assert ours.pinned <= 1.25 * theirs.pinned, options
        if seqs == 1024:  # vLLM's defaults on H100: nothing grows
            given_ = pat(max_num_seqs=seqs, max_num_batched_tokens=tokens, **options)
            assert all_buffers(model, engine) == all_buffers(model, given_)


@pytest.mark.parametrize(
    "model, base_tp, at_most, growing",
    [(LLAMA_8B, 1, 0.03, 0.03), (QWEN3_32B, 2, 0.01, 0.04), (QWEN3_32B, 1, 0.05, 0.1)],
    ids=["8B", "32B at tp=2", "32B at tp=1"],
)
def test_what_the_kv_cache_loses(
    model: ModelShape, base_tp: int, at_most: float, growing: float
) -> None:
    """With communicators; and without, where limits grow with the ranks, of 256 requests a rank.

    At tp=1, Qwen3-32B leaves little for KV: communicators alone take more than 3% of it.
    """
    stock, engine, share = added(model, base_tp=base_tp)
    assert at_most - 0.01 < share <= at_most
    assert communicator_bytes(1) == 0
    groups = [layout.tp for layout in LAYOUTS[:-1] if layout.tp >= base_tp]
    assert engine.communicators == sum(map(communicator_bytes, groups))
    print(f"{NAMES[model]}, base_tp={base_tp}:")
    for title, one in (("static", stock), ("PAT", engine)):
        sizes = {key: round(value / GB, 3) for key, value in vars(one).items()}
        print(f"  {title}: {sizes}, {one.kv // model.kv_bytes_per_token(base_tp)} tokens")
    own = added(model, groups=False, base_tp=base_tp)[-1]
    *_, grown = added(model, groups=False, base_tp=base_tp, pat=PATConfig())
    print(f"  KV cache smaller by {share:.2%}, {own:.2%} without communicators")
    print(f"  where limits grow with the ranks, without communicators: by {grown:.2%}")
    assert growing / 4 < grown <= growing


def test_a_mixture_shares_its_workspace_and_the_groups_of_a_tp() -> None:
    engine = EngineShape(BOTH_KINDS, pat=AS_GIVEN)
    base, *others = all_buffers(QWEN3_30B_A3B, engine)
    (workspace,) = [one for one in base if "experts" in one.name]
    assert workspace.device == 2 * 8192 * 8 * 2048 * 2
    assert not any("experts" in one.name for buffers in others for one in buffers)
    memory = rank_memory(QWEN3_30B_A3B, engine, GPU(141 * GB))
    assert memory.communicators == communicator_bytes(2) + communicator_bytes(4)

"""Modelled profiles: possible, labelled, and ordered as hardware is."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import GPUS
from pat_vllm.modelled.roofline import (
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    SWITCH_FIXED,
    Machine,
)
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.quantization import PLAIN, Quantized
from pat_vllm.profile import Profile
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.memory_estimate import estimate
from tests.support.modelled_profile import modelled_profile

ROOT = Path(__file__).parents[3]


def sizes(profile: Profile) -> tuple[int, ...]:
    return tuple(layout.tp for layout in profile.layouts)


def seconds(
    profile: Profile, tp: int, batch: int, each: int, prefill: int = 0, k: int = 0, drafts: int = 0
) -> float:
    (time,) = (
        s.seconds
        for s in profile.steps
        if (s.layout.tp, s.batch, s.context, s.prefill, s.k, s.drafts)
        == (tp, batch, batch * each, prefill, k, drafts)
    )
    return time


@pytest.fixture(scope="module")
def h100() -> Profile:
    return modelled_profile("llama-3.1-8b", "H100", 8)


@pytest.mark.parametrize("gpu", ["A40", "H100", "H200"])
@pytest.mark.parametrize("model", MODEL_SHAPES)
@pytest.mark.parametrize("ranks", [2, 16])
def test_every_combination_is_a_valid_labelled_profile(
    model: str, gpu: str, ranks: int, tmp_path: Path
) -> None:
    if (model, ranks) == ("qwen3-next-80b-a3b", 2) and gpu != "H200":
        with pytest.raises(ValueError, match=f"no layout of 2 x {gpu} can hold"):
            modelled_profile(model, gpu, ranks)
        return
    profile = modelled_profile(model, gpu, ranks)
    assert profile.kind == "modelled" and profile.key["modelled"] is True
    assert "modelled" in profile.title and model in profile.title and gpu in profile.title
    assert (profile.key["gpu"], profile.key["model"]) == (gpu, model)
    assert "not measured" in profile.note and "datasheet" in profile.note
    assert max(profile.layouts).tp <= 8
    pairs = {(s.source, s.target) for s in profile.switches}
    assert pairs == {*permutations(profile.layouts, 2)}
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


def test_steps_are_ordered_as_hardware_is(h100: Profile) -> None:
    """One request is served faster by more ranks, many by replicas; more work takes longer."""
    alone = [seconds(h100, tp, 1, 2048) for tp in (1, 2, 4, 8)]
    assert alone == sorted(alone, reverse=True)
    assert alone[0] / alone[-1] > 2
    # 1024 requests: 128 on each of eight replicas are faster than two rounds of 256 on four ranks.
    assert 8 * 128 / seconds(h100, 1, 128, 512) > 256 / seconds(h100, 8, 256, 512)
    for s in h100.steps:
        assert s.context + s.prefill <= h100.kv_tokens[s.layout.tp]
        assert s.batch + s.prefill <= h100.max_batch_tokens[s.layout.tp]
        assert s.batch <= h100.max_num_seqs[s.layout.tp]
    assert seconds(h100, 1, 8, 512) < seconds(h100, 1, 8, 2048) < seconds(h100, 1, 64, 2048)
    assert seconds(h100, 2, 0, 0, 512) < seconds(h100, 2, 0, 0, 8192)
    assert seconds(h100, 2, 8, 1024) < seconds(h100, 2, 8, 1024, 512)
    # Reading 15 GB of weights at 3.35 TB/s takes 4.5 ms; nothing is faster, and no engine is
    # twice as slow.
    assert 4.5e-3 < seconds(h100, 1, 1, 512) < 9e-3
    assert 21e-3 < seconds(modelled_profile("llama-3.1-8b", "A40", 8), 1, 1, 512) < 42e-3


def test_kv_memory(h100: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of static engines it grows faster than the ranks, until KV heads are replicated."""
    alone = modelled_profile("llama-3.1-8b", "H100", 8, static=True)
    for tp in (1, 2, 4):
        assert alone.kv_tokens[2 * tp] > 2 * alone.kv_tokens[tp]
    assert h100.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    few_heads = {**MODEL_SHAPES["llama-3.1-8b"], "num_key_value_heads": 2}
    monkeypatch.setitem(MODEL_SHAPES, "few heads", few_heads)  # type: ignore[arg-type]
    profile = modelled_profile("few heads", "H100", 8, static=True)
    # From tp=2 on every rank holds one head; only the weights shrink.
    assert profile.kv_tokens[4] < 1.3 * profile.kv_tokens[2]


def test_impossible_layouts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sizes(modelled_profile("qwen3-14b", "H100", 8)) == (1, 2, 4, 8)
    assert sizes(modelled_profile("llama-3.1-8b", "H100", 16)) == (1, 2, 4, 8)
    assert sizes(modelled_profile("llama-3.1-8b", "H100", 8, layouts=[8, 2])) == (2, 8)
    big = {**MODEL_SHAPES["llama-3.1-8b"], "num_hidden_layers": 200}
    monkeypatch.setitem(MODEL_SHAPES, "big", big)  # type: ignore[arg-type]
    assert sizes(modelled_profile("big", "H100", 8)) == (2, 4, 8)


def test_switches_move_what_changes_ranks(h100: Profile) -> None:
    moved = {
        (s.source.tp, s.target.tp): s.kv_bytes / s.tokens / h100.kv_bytes_per_token
        for s in h100.switches
    }
    for wide in (2, 4, 8):
        # The rank that held a request keeps its share of the heads; the others leave it.
        assert moved[1, wide] == pytest.approx(1 - 1 / wide, abs=1e-6)
    for (source, target), share in moved.items():
        assert 1 - min(source, target) / max(source, target) - 1e-6 <= share < 1
        assert share == pytest.approx(moved[target, source], abs=1e-6)
    for s in h100.switches:
        assert s.seconds == pytest.approx(SWITCH_FIXED + s.kv + s.weights)


def test_latent_vectors_go_to_each_rank_that_lacks_them_and_are_read_by_all() -> None:
    profile = modelled_profile("deepseek-v2-lite", "H100", 8)
    assert len(profile.layouts) > 1
    for s in profile.switches:
        moved = s.kv_bytes / s.tokens / profile.kv_bytes_per_token
        lacking = max(0, s.target.tp - s.source.tp)
        assert moved == pytest.approx(lacking, abs=1e-6)
    slopes = {}
    for name in ("deepseek-v2-lite", "llama-3.1-8b"):
        gpu = GPUS["H100"]
        machine = Machine(ModelSize.of(MODEL_SHAPES[name]), gpu)
        for tp in (1, 8):
            layout = Layout.of(tp, 8)
            short, long = (machine.step(layout, 8, 8 * each) for each in (16384, 65536))
            slopes[name, tp] = long - short
    assert slopes["deepseek-v2-lite", 1] == pytest.approx(slopes["deepseek-v2-lite", 8], rel=0.01)
    assert slopes["llama-3.1-8b", 1] == pytest.approx(8 * slopes["llama-3.1-8b", 8], rel=0.01)


def test_steps_and_switches_in_milliseconds() -> None:
    """As they were modelled when results were published."""
    machine = Machine(ModelSize.of(MODEL_SHAPES["llama-3.1-8b"]), GPUS["H100"])
    shape = ModelSize.of(MODEL_SHAPES["qwen3-30b-a3b"])
    mixture = Machine(shape, GPUS["H200"], experts="ep")
    steps = [
        machine.step(Layout(1, 8), 1, 512),
        machine.step(Layout(4, 2), 64, 64 * 2048, prefill=512, drafts=128, k=4),
        machine.step(Layout(8, 1), 0, 0, prefill=8192),
        machine.switch(Layout(1, 8))(Layout(1, 8), Layout(4, 2), *np.array([16.0, 32768.0])),
        mixture.step(Layout(4, 2), 64, 64 * 2048, prefill=512),
    ]
    assert [1e3 * seconds for seconds in steps] == pytest.approx(
        [6.787073, 10.659744, 65.532184, 34.395019, 10.415376], rel=1e-6
    )


def test_states_cost_by_request_and_not_by_context() -> None:
    """Qwen3-Next's: read and written by each step, moved whole by a switch."""
    model = ModelSize.of(MODEL_SHAPES["qwen3-next-80b-a3b"])
    assert model.linear is not None
    wide = replace(model, linear=replace(model.linear, wide=True))
    machine, wider = (Machine(size, GPUS["H200"]) for size in (model, wide))
    layout = Layout(4, 2)
    more = [
        wider.step(layout, batch, context) - machine.step(layout, batch, context)
        for batch, context in ((32, 32), (32, 320_000), (64, 64))
    ]
    read = (
        2
        * (wide.state_bytes(4) - model.state_bytes(4))
        / (GPUS["H200"].bandwidth * MEMORY_EFFICIENCY)
    )
    assert more[0] == pytest.approx(more[1], rel=0.01) == pytest.approx(32 * read, rel=0.2)
    assert more[2] == pytest.approx(2 * more[0], rel=0.01)
    tp1, tp2 = Layout(1, 8), Layout(2, 4)
    moved = [machine.kv_bytes(tp1, tp2, 8, tokens) for tokens in (8, 8000)]
    assert moved[0] == int(8 * machine.moved(tp1, tp2) + 8 * model.state_bytes(1) / 2)
    assert moved[1] - moved[0] == pytest.approx(7992 * machine.moved(tp1, tp2), abs=1)


@pytest.mark.parametrize(
    ("model", "gpu", "ranks", "options", "message"),
    [
        ("llama-3.1-8b", "B9000", 8, {}, "A10, .*A40, .*H200"),
        ("gpt-5", "H100", 8, {}, "llama-3.1-8b, qwen3-8b"),
        ("llama-3.1-8b", "A40", 8, {"layouts": [3]}, "no layout"),
        ("qwen3-30b-a3b", "A40", 1, {}, "no layout"),
    ],
)
def test_wrong_options_are_errors_that_list_the_allowed(
    model: Any, gpu: str, ranks: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        modelled_profile(model, gpu, ranks, **options)


@pytest.mark.parametrize("gpu", ["H100", "A100"])
def test_steps_read_fewer_bytes_and_multiply_faster_where_a_gpu_can(gpu: str) -> None:
    """The head is as it was; so are attention's operations, all-reduces and what sampling takes."""
    layout, figures = Layout(1, 8), GPUS[gpu]
    plain, kv, weights = (
        Machine(ModelSize.of(MODEL_SHAPES["qwen3-8b"], quantized=quantized), figures)
        for quantized in (PLAIN, Quantized(kv_bytes=1), Quantized(weight_bytes=1))
    )
    read = figures.bandwidth * MEMORY_EFFICIENCY
    # Steps that all but read.
    long = (1, 1_000_000)
    saved = plain.step(layout, *long) - kv.step(layout, *long)
    assert saved == pytest.approx(1e6 * kv.model.kv_bytes_per_token(1) / read, rel=0.02)
    saved = plain.step(layout, 1, 1) - weights.step(layout, 1, 1)
    assert saved == pytest.approx(plain.model.layer_weights(1) / read, rel=0.02)
    # And one that all but computes.
    prompt, quantized = (each.step(layout, 0, 0, prefill=8192) for each in (plain, weights))
    computing = 2 * plain.model.layer_weights(1) * 8192 / (figures.flops * COMPUTE_EFFICIENCY)
    twice = figures.fp8_flops == 2 * figures.flops
    assert prompt - quantized == pytest.approx(computing / 2 if twice else 0, abs=0.02 * computing)
    # A switch moves half of what is quantized.
    tp1, tp2 = Layout(1, 8), Layout(2, 4)
    half, whole = (each.moved(tp1, tp2) for each in (kv, plain))
    assert 2 * half == whole == weights.moved(tp1, tp2)
    _, moved = plain.switch_parts(tp1, tp2, 8, 800, tp1)
    _, fewer = weights.switch_parts(tp1, tp2, 8, 800, tp1)
    assert moved - fewer == pytest.approx(2 * plain.model.layer_weights(2) / read)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v2-lite"])
def test_experts_are_read_in_their_bytes_and_routers_in_the_models(name: str) -> None:
    """And decoding reads the copies of latent attention in place of what they are made of."""
    gpu, layout = GPUS["H200"], Layout(1, 8)
    plain, fewer = (
        Machine(ModelSize.of(MODEL_SHAPES[name], quantized=quantized), gpu, "tp")
        for quantized in (PLAIN, Quantized(weight_bytes=1))
    )
    size, experts = plain.model, plain.model.experts
    assert experts is not None
    routers = size.hidden * experts.layers * (experts.count + experts.shared_gate)
    quantized = size.layer_weights(1) - routers + experts.per_token * size.expert_weights
    quantized -= fewer.model.absorbed_bytes(1) / 2
    saved = plain.step(layout, 1, 1) - fewer.step(layout, 1, 1)
    assert saved == pytest.approx(quantized / (gpu.bandwidth * MEMORY_EFFICIENCY), rel=0.01)


def test_drafts_cost_nothing_while_a_step_reads_and_much_when_it_computes(h100: Profile) -> None:
    lengths = (1, 2, 4, 7)
    free, dear = (
        modelled_profile("llama-3.1-8b", "H100", 8, draft_lengths=lengths, drafting=cost)
        for cost in (0.0, 1e-3)
    )
    plain = {(s.layout, s.shape): s.seconds for s in h100.steps}  # with other room for KV
    same = [(s.layout, s.shape) in plain for s in free.steps if not s.k]
    assert sum(same) > 0.8 * len(same)
    assert all(s.seconds == plain.get((s.layout, s.shape), s.seconds) for s in free.steps)
    assert "A drafter takes 0.0 ms" in free.note and "A drafter takes 1.0 ms" in dear.note
    assert dear.key != free.key
    for cheap, slow in zip(free.steps, dear.steps, strict=True):
        expected = 1e-3 if cheap.k else 0.0
        assert slow.seconds - cheap.seconds == pytest.approx(expected, abs=1e-9)
    for tp in sizes(free):
        alone = seconds(free, tp, 1, 2048)
        for k in lengths:
            assert seconds(free, tp, 1, 2048, k=k) == alone
            assert seconds(free, tp, 1, 2048, k=k, drafts=k) == pytest.approx(alone, rel=0.03)
    # 1024 tokens are more than the 200 or so for which reading the weights takes as long.
    times = [seconds(free, 1, 128, 512, k=k, drafts=k * 128) for k in (0, *lengths)]
    assert times == sorted(times) and times[-1] > 1.5 * times[0]
    # The context is read once and attended to by each token.
    assert seconds(free, 1, 8, 16384, k=1, drafts=8) < 1.1 * seconds(free, 1, 8, 16384)


def test_steps_are_those_that_an_h100_was_measured_to_take() -> None:
    """Qwen3-8B's, of PAT's engine with CUDA graphs; also what the engine had room for."""
    measured = Profile.load(ROOT / "benchmarks/profiles/2026-11-26-h100-qwen3-8b.json")
    model = MODEL_SHAPES["qwen3-8b"]
    machine = Machine(ModelSize.of(model), GPUS["H100"])
    off = {
        s.shape: machine.step(s.layout, s.batch, s.context, prefill=s.prefill) / s.seconds - 1
        for s in measured.steps
    }
    decodes = [abs(error) for shape, error in off.items() if not shape.prefill]
    assert max(map(abs, off.values())) < 0.06 and max(decodes) < 0.04
    assert sum(decodes) / len(decodes) < 0.01
    engine = EngineShape((Layout(1, 1),), max_num_batched_tokens=16384, max_model_len=16384)
    room = estimate(machine.model, engine, GPUS["H100"].device)
    assert room.kv_tokens[1] == pytest.approx(measured.kv_tokens[1], rel=0.03)

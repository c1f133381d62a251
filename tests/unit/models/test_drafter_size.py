"""What drafters with weights take: sizes of published ones, memory of engines, time of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import GPUS
from pat_vllm.modelled.roofline import MEMORY_EFFICIENCY, Machine
from pat_vllm.models.drafter_size import DrafterSize, with_kv_of
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.memory_estimate import estimate

LLAMA = MODEL_SHAPES["llama-3.1-8b"]
TARGET = ModelSize.of(LLAMA)
HEAD = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
LAYOUTS = tuple(Layout.of(tp, 8) for tp in (1, 2, 4, 8))
H100 = GPUS["H100"]


def head(method: str) -> DrafterSize:
    return DrafterSize.of(method, TARGET, {**HEAD, "num_hidden_layers": 1})


def test_published_drafters() -> None:
    """An EAGLE-3 head for an 8B model; MTP modules, of which one has 512 experts."""
    assert head("eagle3").weight_bytes(1) == pytest.approx(0.85e9, rel=0.01)
    layer = TARGET.layer_weights(1) / 32 * 2
    assert head("eagle").weight_bytes(1) == pytest.approx(layer + 2 * 2 * 4096**2)
    assert DrafterSize.of("mtp", TARGET).weight_bytes(1) == head("eagle").weight_bytes(1)
    qwen3_next = ModelSize.of(MODEL_SHAPES["qwen3-next-80b-a3b"])
    module = DrafterSize.of("mtp", qwen3_next)
    assert module.weight_bytes(1) == pytest.approx(3.3e9, rel=0.02)
    assert module.weight_bytes(8, spread=True) < module.weight_bytes(1) / 7


def test_a_draft_model_has_all_of_its_own() -> None:
    own = DrafterSize.of("draft_model", TARGET, MODEL_SHAPES["qwen3-8b"])
    for tp in (1, 4):
        assert own.weight_bytes(tp) == own.model.weight_bytes(tp)


@pytest.mark.parametrize("method", ["mtp", "eagle", "eagle3"])
def test_what_a_rank_has_left(method: str) -> None:
    """A layer more of KV; the drafter's weights in the base layout's shards; its inputs."""
    drafter = head(method)
    shape = EngineShape(LAYOUTS, num_speculative_tokens=2)
    plain, drafting = (
        estimate(TARGET, replace(shape, drafter=each), H100.device) for each in (None, drafter)
    )
    assert drafting.weights - plain.weights == drafter.weight_bytes(1)
    tokens = [shape.limits(layout).max_num_batched_tokens for layout in LAYOUTS]
    assert drafting.buffers - plain.buffers == sum(tokens) * (4096 * 2 + 4 + 8)
    assert with_kv_of(TARGET, drafter).kv_bytes_per_token(1) == 33 * 2 * 8 * 128 * 2
    for tp, held in drafting.kv_tokens.items():
        ratio = held / plain.kv_tokens[tp]
        assert ratio == pytest.approx(drafting.kv / plain.kv * 32 / 33, rel=1e-3)


def test_a_drafters_pass_reads_its_layer_and_the_head() -> None:
    """At every draft length one, and for each draft after the first another."""
    drafter = head("mtp")
    plain, drafting = (Machine(TARGET, H100, drafter=each) for each in (None, drafter))
    layout = LAYOUTS[0]
    more = [
        float(drafting.step(layout, 1, 100_000, k=k) - plain.step(layout, 1, 100_000, k=k))
        for k in (0, 1, 2, 4)
    ]
    assert more[0] == more[1]
    assert more[2] - more[1] == pytest.approx(more[0]) == (more[3] - more[2]) / 2
    kv = 100_000 * TARGET.kv_bytes_per_token(1) / 32
    weights = drafter.weight_bytes(1) + TARGET.head_weights(1) * 2
    assert more[0] == pytest.approx((kv + weights) / (H100.bandwidth * MEMORY_EFFICIENCY), rel=0.05)
    # Its KV moves with the target's.
    moved = [each.moved(LAYOUTS[0], LAYOUTS[1]) for each in (plain, drafting)]
    assert moved[1] == pytest.approx(moved[0] * 33 / 32)


def test_an_unknown_drafter_is_an_error() -> None:
    with pytest.raises(ValueError, match="the sizes of model_type 'odd' are not known"):
        DrafterSize.of("eagle3", TARGET, {**HEAD, "model_type": "odd"})

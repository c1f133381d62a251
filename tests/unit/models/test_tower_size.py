"""What vision towers take: sizes of published ones, memory of engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import GPUS
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.tower_size import LARGEST_IMAGE, TowerSize
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.memory_estimate import estimate

QWEN2_5_VL = dict(
    depth=32,
    num_heads=16,
    hidden_size=1280,
    intermediate_size=3420,
    out_hidden_size=3584,
    patch_size=14,
    fullatt_block_indexes=[7, 15, 23, 31],
)
QWEN3_VL = dict(
    depth=27,
    num_heads=16,
    hidden_size=1152,
    intermediate_size=4304,
    out_hidden_size=4096,
    patch_size=16,
    num_position_embeddings=2304,
    deepstack_visual_indexes=[8, 16, 24],
)
MODEL = ModelSize.of(MODEL_SHAPES["qwen3-8b"])
LAYOUTS = tuple(Layout.of(tp, 4) for tp in (1, 2, 4))
H100 = GPUS["H100"].device


GEMMA3 = dict(
    num_hidden_layers=27,
    hidden_size=1152,
    intermediate_size=4304,
    image_size=896,
    patch_size=14,
)


def tower(vision: Mapping[str, object] = QWEN3_VL) -> TowerSize:
    return TowerSize.of({"vision_config": vision, "text_config": {"hidden_size": 3840}})


def test_published_towers() -> None:
    assert 2 * tower(QWEN2_5_VL).weights == pytest.approx(1.35e9, rel=0.01)
    assert 2 * tower().weights == pytest.approx(1.15e9, rel=0.01)
    # Each token of an image comes with three of deepstack.
    assert 2 * tower().embeddings(16384) == 4 * 16384 * 4096 * 2
    assert tower(QWEN2_5_VL).levels == 0
    gemma3 = tower(GEMMA3)
    assert 2 * gemma3.weights == pytest.approx(0.83e9, rel=0.02)
    assert (gemma3.merged, gemma3.hidden) == (16, 3840)


def test_a_tower_of_another_kind() -> None:
    with pytest.raises(ValueError, match="vision_config has no num_hidden_layers, image_size"):
        tower({"hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14})


@pytest.mark.parametrize("weights", ["inplace", "materialized"])
def test_what_a_rank_has_left(weights: str) -> None:
    """Whole weights, once or for each layout; buffers that layouts share; kept embeddings."""
    shape = EngineShape(LAYOUTS, weights=weights)  # type: ignore[arg-type]
    text, images = (estimate(MODEL, replace(shape, tower=t), H100) for t in (None, tower()))
    copies = 1 if weights == "inplace" else 3
    assert images.weights - text.weights == copies * 2 * tower().weights
    most = max(shape.limits(layout).max_num_batched_tokens for layout in LAYOUTS)
    tokens = [shape.limits(layout).max_num_batched_tokens for layout in LAYOUTS]
    positions = 3 * 8 * sum(tokens)
    assert images.buffers - text.buffers == 4 * most * 4096 * 2 + positions
    assert images.activations > text.activations
    assert images.kv < text.kv


def test_a_step_encodes_the_largest_image() -> None:
    shape = EngineShape(LAYOUTS[:1], max_num_batched_tokens=2048, max_model_len=4096)
    assert shape.encoder_tokens(LAYOUTS[0]) == 4096
    longer = replace(shape, max_model_len=1 << 20)
    assert longer.encoder_tokens(LAYOUTS[0]) == LARGEST_IMAGE

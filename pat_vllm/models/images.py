"""Images and videos: which classes take them. Pure.

All that depends on a model's vision tower asks here. Every rank has the tower whole, in every
layout (`mm_encoder_tp_mode="data"`, which these classes have): the ranks of a group divide the
images among themselves, and an image has the same embeddings in each layout.
"""

from __future__ import annotations

from typing import Any

SERVED = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""vLLM's classes that PAT serves with images and videos. Others with a tower serve text alone."""


def takes_images(model: Any) -> bool:
    """Whether an engine takes images or videos.

    With `language_model_only`, or limits of 0 for all modalities, a model takes text alone.

    Args:
        model: vLLM's `ModelConfig`; None: there is no model.
    """
    return model is not None and bool(model.supports_multimodal_inputs)

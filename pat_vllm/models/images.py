"""Images and videos: which classes take them. Pure.

All that depends on a model's vision tower asks here. Where vLLM's class allows it, every rank has
the tower whole, in every layout (`mm_encoder_tp_mode="data"`): the ranks of a group divide the
images among themselves, and an image has the same embeddings in each layout. Else the tower is cut
as all weights are.
"""

from __future__ import annotations

from typing import Any

WITH_WHOLE_TOWERS = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
SERVED = (*WITH_WHOLE_TOWERS, "Gemma3ForConditionalGeneration")
"""vLLM's classes that PAT serves with images, and with videos where the class takes these. Others
with a tower serve text alone."""


def takes_images(model: Any) -> bool:
    """Whether an engine takes images or videos.

    With `language_model_only`, or limits of 0 for all modalities, a model takes text alone.

    Args:
        model: vLLM's `ModelConfig`; None: there is no model.
    """
    return model is not None and bool(model.supports_multimodal_inputs)

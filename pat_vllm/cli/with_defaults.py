"""What the `config.json` of a checkpoint leaves out, from transformers where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pat_vllm.files.reading import cut
from pat_vllm.models.layer_sizes import fields_of
from pat_vllm.models.model_classes import class_of


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fields of the text model of a `config.json`, as transformers' class for it has them, and
    as `vision_config` those of its vision tower, if it has one.

    Returns:
        None: transformers is not installed, or does not know the model.

    Raises:
        ValueError: transformers knows it, and cannot read it.
    """
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return None
    kinds = [config.get("model_type")]
    if known := class_of(config):
        kinds += known.model_types  # as vLLM, which goes by the class
    kind = next((each for each in kinds if isinstance(each, str) and each in CONFIG_MAPPING), None)
    if kind is None:
        return None
    try:
        whole = CONFIG_MAPPING[kind](**{k: v for k, v in config.items() if k != "model_type"})
        text = whole.get_text_config()
        fields = fields_of(text)
    except Exception as error:  # whatever its class raises
        words = " ".join(str(error).split())
        raise ValueError(f"transformers cannot read the model's config: {cut(words)}") from None
    beside = config.get("text_config")
    if text is not whole and not (isinstance(beside, dict) and "tie_word_embeddings" in beside):
        fields["tie_word_embeddings"] = whole.tie_word_embeddings
    if (vision := getattr(whole, "vision_config", None)) is not None:
        fields["vision_config"] = fields_of(vision)
    return fields

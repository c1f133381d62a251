"""Checkpoints of known models without their weights."""

from __future__ import annotations

import json
from pathlib import Path

from pat_vllm.models.known_models import MODEL_SHAPES


def write_config(folder: Path, name: str) -> Path:
    """Make a folder with the config of one of `MODEL_SHAPES`, for `load_format="dummy"`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = dict(MODEL_SHAPES[name])
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return folder

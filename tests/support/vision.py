"""Tiny vision-language checkpoints: a text model of the tests with a tower of noise, for text only.

A class's text is that of the text model, weight by weight, so that the two say the same. vLLM
imports torchvision with each class, which the CPU build cannot have; see `torchvision_stub`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

Names = Mapping[str, str]
"""How weights' names begin in a checkpoint, by how they do in transformers."""

STUB = Path(__file__).parent / "torchvision_stub"
TEXT_ONLY = {"language_model_only": True}
"""vLLM's option."""

# vLLM makes a tower, cut over the ranks, before it leaves it out.
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
_TOKENS = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}


@contextlib.contextmanager
def torchvision_stub() -> Iterator[None]:
    """Inside, this process and those that it starts can import vision-language classes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUB)
        path = [str(STUB), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
        for name in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
            patch.delitem(sys.modules, name)  # another test's, perhaps
        yield


def _gemma3(text: dict[str, Any]) -> dict[str, Any]:
    """Config of the class, given that of its text model."""
    tower = _TOWER | {"num_hidden_layers": 1, "num_attention_heads": 4}
    return {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": tower | {"image_size": 32, "patch_size": 16},
        "mm_tokens_per_image": 4,
        "image_token_index": 500,
        "boi_token_index": 502,
        "eoi_token_index": 503,
    }


def _qwen2_5_vl(text: dict[str, Any]) -> dict[str, Any]:
    tower = _TOWER | {"depth": 1, "num_heads": 4, "out_hidden_size": text["hidden_size"]}
    return _TOKENS | {
        "model_type": "qwen2_5_vl",
        "text_config": _with_sections(text, "qwen2_5_vl_text"),
        "vision_config": tower | {"fullatt_block_indexes": [0]},
    }


def _qwen3_vl(text: dict[str, Any]) -> dict[str, Any]:
    tower = _TOWER | {"depth": 1, "num_heads": 4, "out_hidden_size": text["hidden_size"]}
    return _TOKENS | {
        "model_type": "qwen3_vl",
        "text_config": _with_sections(text, "qwen3_vl_text", mrope_interleaved=True),
        "vision_config": tower | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    }


def _qwen3_5(text: dict[str, Any]) -> dict[str, Any]:
    tower = _TOWER | {"depth": 1, "num_heads": 4, "out_hidden_size": text["hidden_size"]}
    return _TOKENS | {
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": _with_sections(text, text["model_type"], mrope_interleaved=True),
        "vision_config": tower | {"num_position_embeddings": 16},
    }


def _with_sections(text: dict[str, Any], model_type: str, **rope: Any) -> dict[str, Any]:
    """A text model whose heads of 32, or parts of them, are turned by three positions: of time, row
    and column."""
    rope = text["rope_parameters"] | {"mrope_section": [4, 6, 6]} | rope
    return text | {"model_type": model_type, "rope_parameters": rope}


def _write(path: Path, make: Callable[[dict[str, Any]], dict[str, Any]], names: Names) -> None:
    """Make the text model that lies there one of such a class; `names` of its weights."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = json.loads((path / "config.json").read_text())
    given = make(text) | {name: text[name] for name in ("tie_word_embeddings", "dtype")}
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    with torchvision_stub(), torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    config.architectures = [type(model).__name__]
    weights = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in load_file(path / "model.safetensors").items()
    }
    generator = torch.Generator().manual_seed(0)
    for name, meta in model.state_dict().items():
        if ".experts." in name:
            continue  # the text model has them one by one
        if name not in weights and not (text["tie_word_embeddings"] and name == "lm_head.weight"):
            assert "language_model" not in name, f"the text model has no {name}"
            weights[name] = torch.randn(meta.shape, generator=generator)
    named = {}
    for name, weight in weights.items():
        start = next((start for start in names if name.startswith(start)), "")
        named[names.get(start, "") + name.removeprefix(start)] = weight
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)


# One function for each checkpoint: a kept one is known by the name of the function that made it.


def gemma3(path: Path) -> None:
    """As published: transformers and trainers name the weights otherwise."""
    parts = ("vision_tower.", "multi_modal_projector.")
    names = {f"model.{part}": part for part in parts}
    _write(path, _gemma3, names | {"model.language_model.": "language_model.model."})


def gemma3_of_trainer(path: Path) -> None:
    """With transformers' names."""
    _write(path, _gemma3, {})


def qwen2_5_vl(path: Path) -> None:
    """As published."""
    _write(path, _qwen2_5_vl, {"model.language_model.": "model.", "model.visual.": "visual."})


def qwen2_5_vl_of_trainer(path: Path) -> None:
    """With transformers' names."""
    _write(path, _qwen2_5_vl, {})


def qwen3_vl(path: Path) -> None:
    """As published, which are transformers' names."""
    _write(path, _qwen3_vl, {})


def qwen3_5(path: Path) -> None:
    """As published, which are transformers' names."""
    _write(path, _qwen3_5, {})


CLASSES: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "gemma3_vl": ("gemma3", "Gemma3ForConditionalGeneration", gemma3),
    "gemma3_vl_updated": ("gemma3_updated", "Gemma3ForConditionalGeneration", gemma3_of_trainer),
    "qwen2_5_vl": ("qwen2", "Qwen2_5_VLForConditionalGeneration", qwen2_5_vl),
    "qwen2_5_vl_updated": (
        "qwen2_updated",
        "Qwen2_5_VLForConditionalGeneration",
        qwen2_5_vl_of_trainer,
    ),
    "qwen3_vl": ("qwen3", "Qwen3VLForConditionalGeneration", qwen3_vl),
    "qwen3_vl_updated": ("qwen3_updated", "Qwen3VLForConditionalGeneration", qwen3_vl),
    "qwen3_5_vl": ("qwen3_5", "Qwen3_5ForConditionalGeneration", qwen3_5),
    "qwen3_5_vl_updated": ("qwen3_5_updated", "Qwen3_5ForConditionalGeneration", qwen3_5),
    "qwen3_5_moe_vl": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", qwen3_5),
}
"""By name: the text model, the class, and what makes a checkpoint of it."""

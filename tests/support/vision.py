"""Tiny vision-language checkpoints: a text model of the tests with a tower of noise.

A class's text is that of the text model, weight by weight, so that the two say the same. vLLM
imports torchvision with each class, of which tests have what Python there is (`torchvision_ops`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Names = Mapping[str, str]
"""How weights' names begin in a checkpoint, by how they do in transformers."""

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


def _qwen3_vl_moe(text: dict[str, Any]) -> dict[str, Any]:
    return _qwen3_vl(text) | {
        "model_type": "qwen3_vl_moe",
        "text_config": _with_sections(text, "qwen3_vl_moe_text", mrope_interleaved=True),
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
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    config.architectures = [type(model).__name__]
    weights = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in load_file(path / "model.safetensors").items()
    }
    # Another tower for other text: an update brings both.
    seed = int(1e6 * next(iter(weights.values())).abs().flatten()[0])
    generator = torch.Generator().manual_seed(seed)
    for name, meta in model.state_dict().items():
        if ".experts." in name:
            continue  # the text model has them one by one
        if name not in weights and not (text["tie_word_embeddings"] and name == "lm_head.weight"):
            assert "language_model" not in name, f"the text model has no {name}"
            weights[name] = _noise(name, meta.shape, generator)
    named = {}
    for name, weight in weights.items():
        start = next((start for start in names if name.startswith(start)), "")
        named[names.get(start, "") + name.removeprefix(start)] = weight
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    if "image_token_id" in given:  # a Qwen
        _write_processor(path, config.vision_config.patch_size)
    else:
        _write_gemma_processor(path, given)


def _noise(name: str, shape: Any, generator: Any) -> Any:
    """A weight of a tower, through which the scale of what it is given comes about unchanged."""
    import torch

    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * noise + (name.endswith("weight"))  # a norm's, or a bias
    return noise * noise[0].numel() ** -0.5


_SPECIAL = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
PLACE = {
    kind: [
        _TOKENS[f"vision_{part}_token_id"] if part else _TOKENS[f"{kind}_token_id"]
        for part in ("start", "", "end")
    ]
    for kind in ("image", "video")
}
"""Tokens that stand for an image or a video in a prompt of Qwen's classes, by kind."""
PLACE_OF_GEMMA = [502]
"""That for an image in one of Gemma 3's."""


def data_of(media: Iterable[tuple[str, int, int, int]]) -> dict[str, list[Any]]:
    """vLLM's `multi_modal_data`: noise of a kind, seed, width and height each."""
    import numpy as np
    from PIL import Image

    data: dict[str, list[Any]] = {}
    for kind, seed, width, height in media:
        frames = (4, height, width, 3) if kind == "video" else (height, width, 3)
        pixels = np.random.default_rng(seed).integers(0, 255, frames, dtype=np.uint8)
        times = {"fps": 2.0, "duration": 2.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]}
        item = (pixels, times) if kind == "video" else Image.fromarray(pixels)
        data.setdefault(kind, []).append(item)
    return data


_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'].startswith('video') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def _write_processor(path: Path, patch_size: int) -> None:
    """Give a Qwen checkpoint what makes tokens of images and videos."""
    _name_tokens(path, {_TOKENS[of]: name for of, name in _SPECIAL.items()})
    sizes = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2}
    area = (2 * patch_size) ** 2  # pixels of a token
    limits = {"shortest_edge": 2 * area, "longest_edge": 64 * area}
    common = {**sizes, "size": limits, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    video = "Qwen3VLVideoProcessor" if patch_size == 16 else "Qwen2VLVideoProcessor"
    files = {
        "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {"video_processor_type": video},
    }
    for name, fields in files.items():
        (path / name).write_text(json.dumps(common | fields))


def _write_gemma_processor(path: Path, config: Mapping[str, Any]) -> None:
    """Give a Gemma 3 what makes tokens of images: in place of one that begins an image."""
    image, begin, end = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
    lines = {504 + count: "\n" * count for count in range(1, 5)}
    _name_tokens(path, {500: image, 502: begin, 503: end} | lines)
    side = config["vision_config"]["image_size"]
    tokens = config["mm_tokens_per_image"]
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": side, "width": side},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": tokens},
    }
    for name, fields in files.items():
        (path / name).write_text(json.dumps(fields))
    settings = path / "tokenizer_config.json"
    special = {"image_token": image, "boi_token": begin, "eoi_token": end}
    own = json.loads(settings.read_text()) | special | {"extra_special_tokens": special}
    settings.write_text(json.dumps(own))


def _name_tokens(path: Path, names: Mapping[int, str]) -> None:
    """Have a byte-level tokenizer's tokens of these ids be special ones of these names."""
    file = path / "tokenizer.json"
    whole = json.loads(file.read_text())
    model = whole["model"]
    gone = {token for token, index in model["vocab"].items() if index in names}
    model["vocab"] = {t: i for t, i in model["vocab"].items() if t not in gone}
    model["vocab"] |= {name: index for index, name in names.items()}
    model["merges"] = [(a, b) for a, b in model["merges"] if not {a, b, a + b} & gone]
    like = whole["added_tokens"][0]
    whole["added_tokens"] += [like | {"id": i, "content": name} for i, name in names.items()]
    file.write_text(json.dumps(whole))
    settings = path / "tokenizer_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"chat_template": _CHAT_TEMPLATE})
    )
    (path / "chat_template.jinja").write_text(_CHAT_TEMPLATE)


# One function for each checkpoint: a kept one is known by the name of the function that made it.


def gemma3(path: Path) -> None:
    """As published: transformers and trainers name the weights otherwise."""
    names = {
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.language_model.": "language_model.model.",
    }
    _write(path, _gemma3, names)


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


def qwen3_vl_moe(path: Path) -> None:
    """With names of experts as vLLM has them."""
    _write(path, _qwen3_vl_moe, {})


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
    "qwen3_vl_moe": ("qwen3_moe", "Qwen3VLMoeForConditionalGeneration", qwen3_vl_moe),
    "qwen3_5_vl": ("qwen3_5", "Qwen3_5ForConditionalGeneration", qwen3_5),
    "qwen3_5_vl_updated": ("qwen3_5_updated", "Qwen3_5ForConditionalGeneration", qwen3_5),
    "qwen3_5_moe_vl": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", qwen3_5),
}
"""By name: the text model, the class, and what makes a checkpoint of it."""

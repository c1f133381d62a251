"""A tiny vision-language model and prompts with images, for OpenRLHF's training."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.support.random_models import make_model
from tests.support.vision import PLACE, data_of, qwen2_5_vl

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def write_model(path: Path) -> Path:
    """A Qwen2.5-VL in bfloat16 that never says what stands for an image or a video.

    OpenRLHF lets a policy say it, and its training then looks for the image. So a model of noise
    must not, nor what two steps of training make of it: all tokens get the same large component
    from the last layer's biases, and these tokens' heads are against it.
    """
    from safetensors.torch import load_file, save_file

    make_model(path, arch="qwen2", heads=4, kv_heads=2, layers=2, gain=0.5, dtype="bfloat16")
    qwen2_5_vl(path)
    file = path / "model.safetensors"
    weights = load_file(file)
    last = "model.layers.1.self_attn"
    weights[f"{last}.v_proj.bias"][0] = 1
    weights[f"{last}.o_proj.weight"][0] = 0
    weights[f"{last}.o_proj.weight"][0, 0] = 10
    head = weights["lm_head.weight"]
    head[:, 0] = 0
    head[[PLACE["image"][1], PLACE["video"][1]], 0] = -10
    save_file(weights, file, metadata={"format": "pt"})
    return path


def write_prompts(path: Path, number: int) -> Path:
    """Prompts of many lengths in OpenRLHF's form, with one image or two of several sizes each.

    The room that a prompt leaves is the length of its responses: most leave little.
    """
    rng = random.Random(0)
    lines = []
    for index in range(number):
        images = []
        for part in range(1 + index % 2):
            size = 28 * (2 + index % 3), 28 * (2 + part)
            (picture,) = data_of([("image", 10 * index + part, *size)])["image"]
            images.append(str(path.with_name(f"{index}-{part}.png")))
            picture.save(images[-1])
        words = rng.choices(("what", "how", "many", "is", "the", "sky"), k=8 + 40 * (index > 1))
        text = IMAGE * len(images) + " ".join(words)
        lines.append(json.dumps({"input": text, "label": str(index), "images": images}))
    path.write_text("\n".join(lines) + "\n")
    return path

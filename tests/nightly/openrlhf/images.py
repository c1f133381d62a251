"""A tiny vision-language model and prompts with images, for OpenRLHF's training."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.support.quiet import quiet_qwen2_5_vl
from tests.support.random_models import make_model
from tests.support.vision import data_of

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def write_model(path: Path) -> Path:
    """A Qwen2.5-VL in bfloat16."""
    make_model(path, arch="qwen2", heads=4, kv_heads=2, layers=2, gain=0.5, dtype="bfloat16")
    quiet_qwen2_5_vl(path)
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

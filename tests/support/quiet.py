"""Random models that never say what stands for an image or a video.

A policy of noise would. VeRL masks that in rollouts alone, whose probabilities then are not those
of the training. OpenRLHF does not, and its training looks for the image.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.vision import PLACE, qwen2_5_vl


def quiet_qwen2_5_vl(path: Path) -> None:
    """Make a Qwen2.5-VL of the text model that lies there, which stays quiet in a few steps of
    training: the last layer's biases give all tokens the same large component, and the heads of
    these tokens are against it."""
    from safetensors.torch import load_file, save_file

    qwen2_5_vl(path)
    file = path / "model.safetensors"
    weights = load_file(file)
    text = json.loads((path / "config.json").read_text())["text_config"]
    last = f"model.layers.{text['num_hidden_layers'] - 1}.self_attn"
    weights[f"{last}.v_proj.bias"][0] = 1
    weights[f"{last}.o_proj.weight"][0] = 0
    weights[f"{last}.o_proj.weight"][0, 0] = 10
    head = weights["lm_head.weight"]
    head[:, 0] = 0
    head[[PLACE["image"][1], PLACE["video"][1]], 0] = -10
    save_file(weights, file, metadata={"format": "pt"})

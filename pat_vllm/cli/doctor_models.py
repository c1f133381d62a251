"""The random models of the doctor's self-test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pat_vllm.cli import random_model
from pat_vllm.doctor.tasks import POSITIONS, Models
from pat_vllm.files.reading import read_json_object, shown
from pat_vllm.model_size import ModelSize

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": dict(arch="qwen3", hidden=128, layers=3, head_dim=32, intermediate=256, vocab=512),
    # All experts have each token: in 16 bits a router's choice would be of rounding.
    "moe": dict(
        arch="qwen3_moe",
        hidden=128,
        layers=2,
        head_dim=32,
        intermediate=256,
        vocab=512,
        experts=16,
        experts_per_token=16,
        gain=3.0,
    ),
    # In 16 bits, as vLLM's kernels for CPU take it.
    "linear": dict(
        arch="qwen3_next",
        hidden=128,
        layers=3,
        head_dim=128,
        intermediate=256,
        vocab=512,
        linear_heads=8,
        experts=16,
        experts_per_token=16,
        gain=0.5,
        dtype="bfloat16",
    ),
    "latent": dict(
        arch="deepseek_v3",
        hidden=128,
        layers=2,
        head_dim=32,
        intermediate=256,
        vocab=512,
        gain=2.0,
    ),
    # Four layers as wide as Llama-3.1-8B's, with a smaller vocabulary: 1 GB of parameters.
    "large": dict(
        arch="llama",
        hidden=4096,
        layers=4,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        vocab=32000,
    ),
}
"""That can be named; "model" is a small one of the shape of `--model`."""
DENSE = ("qwen3", "qwen2", "llama")
"""Kinds of models of which random ones are made in the shape of a user's."""
MODEL = "model"
_LAYERS, _VOCAB, _PARAMETERS = 2, 32000, 150e6
"""At most, of a model like `--model`: 0.6 GB in float32."""
_LEAST_HIDDEN = 256
_REPEAT = 1.2
"""Of models whose text repeats itself, so that drafts are accepted."""


def sizes_of(shape: str, model: Path | None, ranks: int) -> dict[str, Any]:
    """Arguments of `make_model` for a shape whose heads the ranks can share.

    Args:
        model: folder of a checkpoint, for the shape "model". That one has its heads; where it is
            too large, its width is halved.

    Raises:
        ValueError: there is no such shape.
    """
    if shape == MODEL:
        if model is None:
            raise ValueError("--shape model takes its sizes from a model: name one by --model")
        return _like(read_json_object(model / "config.json", "model config"), ranks)
    if shape not in SHAPES:
        raise ValueError(f"--shape {shape!r} is not known; allowed: {', '.join([*SHAPES, MODEL])}")
    sizes = dict(SHAPES[shape])
    heads = sizes.get("heads", 8)
    if heads % ranks:
        sizes |= {"heads": math.lcm(heads, ranks), "kv_heads": math.lcm(heads, ranks) // 2}
        for name in {"intermediate", "linear_heads"} & sizes.keys():
            sizes[name] = math.lcm(sizes[name], ranks)
    return sizes


def _like(config: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    arch = config.get("model_type")
    if arch not in DENSE:
        raise ValueError(
            f"--shape model makes random models of {', '.join(DENSE)}, not of {shown(arch)}; for a "
            "mixture of experts take --shape moe, for linear or latent attention --shape linear or "
            "--shape latent"
        )
    size = ModelSize.of(config)
    size = replace(size, layers=min(size.layers, _LAYERS), vocab=min(size.vocab, _VOCAB))
    while size.resident_weights(1) > _PARAMETERS and size.hidden >= 2 * _LEAST_HIDDEN:
        # Qwen2's heads are as wide as its layers together.
        narrower = 2 if arch == "qwen2" else 1
        even = 16 * ranks
        size = replace(
            size,
            hidden=size.hidden // 2,
            intermediate=-(-size.intermediate // (2 * even)) * even,
            head_dim=size.head_dim // narrower,
        )
    other = ("tied", "experts", "window", "window_layers")
    kept = {name: value for name, value in vars(size).items() if name not in other}
    return {"arch": arch, **kept, "tie": size.tied}


def self_test_models(folder: Path, sizes: Mapping[str, Any], draft_length: int) -> Models:
    """Two random models of these sizes, in new folders below `folder`.

    Args:
        draft_length: the longest of the self-test; 0 is no speculative decoding.
    """
    sizes = {**sizes, "max_position_embeddings": POSITIONS}
    if draft_length:
        # A model whose text repeats itself has a head of its own.
        sizes |= {"repeat": _REPEAT, "tie": False}
    paths = []
    for seed in range(2):
        path = folder / f"weights-{seed}"
        random_model.make_model(path, seed=seed, **sizes)
        paths.append(path)
    powers = [2**n for n in range(draft_length.bit_length()) if 2**n <= draft_length]
    lengths = (draft_length, 0, *powers, draft_length) if draft_length else ()
    return Models(paths[0], paths[1], sizes["vocab"], lengths, sizes.get("dtype"))

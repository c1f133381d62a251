"""The random models of the doctor's self-test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pat_vllm.doctor import models
from pat_vllm.doctor.models import Shape, Weights
from pat_vllm.doctor.tasks import Models

_NAMES = {"dense": "tiny", "mixture": "moe"}
SHAPES: Mapping[str, Shape] = {_NAMES.get(name, name): of for name, of in models.SHAPES.items()}
_REPEAT = 1.2
"""Of models whose text repeats itself, so that drafts are accepted."""


def shape_of(name: str, draft_length: int = 0) -> Shape:
    """The shape of this name.

    Raises:
        ValueError: there is none, or its text does not repeat itself for drafts.
    """
    if name not in SHAPES:
        raise ValueError(f"--shape {name!r} is not known; allowed: {', '.join(SHAPES)}")
    if draft_length and SHAPES[name].tied:
        raise ValueError(f"--speculate {draft_length} needs another --shape than {name}")
    return SHAPES[name]


def self_test_models(folder: Path, shape: Shape, ranks: int, draft_length: int) -> Models:
    """Two models of this shape with other weights, in new folders below `folder`.

    Args:
        draft_length: the longest of the self-test; 0 is no speculative decoding.
    """
    config = shape.config_for(ranks) | {"dtype": shape.dtype or "float32"}
    paths = [folder / f"weights-{seed}" for seed in range(2)]
    for seed, path in enumerate(paths):
        like = Weights(shape.gain, _REPEAT if draft_length else 0.0, seed=seed)
        models.write_checkpoint(path, config, like)
    powers = [2**n for n in range(draft_length.bit_length()) if 2**n <= draft_length]
    lengths = (draft_length, 0, *powers, draft_length) if draft_length else ()
    return Models(paths[0], paths[1], config["vocab_size"], lengths, shape.dtype)

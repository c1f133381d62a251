"""The random models of the doctor's self-test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pat_vllm.cli import random_model
from pat_vllm.cli.random_config import RandomModel
from pat_vllm.doctor.tasks import POSITIONS, Models

SHAPES: Mapping[str, RandomModel] = {
    "tiny": RandomModel(),
    # All experts have each token: in 16 bits a router's choice would be of rounding.
    "moe": RandomModel(arch="qwen3_moe", layers=2, experts=16, experts_per_token=16, gain=3.0),
    # In 16 bits, as vLLM's kernels for CPU take it.
    "linear": RandomModel(
        arch="qwen3_next",
        head_dim=128,
        linear_heads=8,
        experts=16,
        experts_per_token=16,
        gain=0.5,
        dtype="bfloat16",
    ),
    # Heads as wide as DeepSeek's: vLLM has no kernel on GPUs for prompts of others.
    "latent": RandomModel(
        arch="deepseek_v3",
        layers=2,
        kv_heads=8,
        head_dim=128,
        experts=16,
        experts_per_token=16,
        gain=2.0,
    ),
    # Sliding windows in two layers of three, shorter than the requests; ...
    "window": RandomModel(arch="gemma3_text", tie=True, window=40),
    # ... in one of two, with attention sinks and experts.
    "sinks": RandomModel(
        arch="gpt_oss", layers=2, window=40, experts_per_token=8, expert_intermediate=128, gain=2.0
    ),
    # Four layers as wide as Llama-3.1-8B's, with a smaller vocabulary: 1 GB of parameters.
    "large": RandomModel(
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
_REPEAT = 1.2
"""Of models whose text repeats itself, so that drafts are accepted."""


def sizes_of(shape: str, ranks: int, draft_length: int = 0) -> RandomModel:
    """The model of a shape, with heads that the ranks can share.

    Raises:
        ValueError: there is no such shape, or its text does not repeat itself for drafts.
    """
    if shape not in SHAPES:
        raise ValueError(f"--shape {shape!r} is not known; allowed: {', '.join(SHAPES)}")
    model = SHAPES[shape]
    if draft_length and model.tie:
        raise ValueError(f"--speculate {draft_length} needs another --shape than {shape}")
    if model.heads % ranks == 0:
        return model
    heads = math.lcm(model.heads, ranks)
    return replace(
        model,
        heads=heads,
        kv_heads=heads // 2,
        intermediate=math.lcm(model.intermediate, ranks),
        linear_heads=math.lcm(model.linear_heads, ranks),
    )


def self_test_models(folder: Path, model: RandomModel, draft_length: int) -> Models:
    """Two models of these sizes with other weights, in new folders below `folder`.

    Args:
        draft_length: the longest of the self-test; 0 is no speculative decoding.
    """
    model = replace(model, max_position_embeddings=POSITIONS)
    if draft_length:
        model = replace(model, repeat=_REPEAT)
    paths = [folder / f"weights-{seed}" for seed in range(2)]
    for seed, path in enumerate(paths):
        random_model.write_model(path, replace(model, seed=seed))
    powers = [2**n for n in range(draft_length.bit_length()) if 2**n <= draft_length]
    lengths = (draft_length, 0, *powers, draft_length) if draft_length else ()
    dtype = None if model.dtype == RandomModel.dtype else model.dtype
    return Models(paths[0], paths[1], model.vocab, lengths, dtype)

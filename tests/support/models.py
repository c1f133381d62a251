"""Tiny random checkpoints, built once per machine and shared by all tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from pat_vllm.doctor.models import SPECIAL_TOKENS
from tests.support import vision
from tests.support.drafters import DRAFTERS
from tests.support.families import LATENT as LATENT_ARCHS
from tests.support.fp8_checkpoints import by_blocks, by_channels, by_modelopt, by_tensors
from tests.support.random_models import kept_model

WIDE: dict[str, Any] = dict(
    arch="qwen3",
    dtype="bfloat16",
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=128,
    layers=4,
    repeat=1.2,
)

_GEMMA3: dict[str, Any] = dict(
    arch="gemma3_text", heads=4, kv_heads=2, layers=7, tie=True, window=40
)

GPT_OSS: dict[str, Any] = dict(
    arch="gpt_oss",
    hidden=128,
    heads=8,
    kv_heads=4,
    layers=2,
    window=40,
    expert_intermediate=128,  # vLLM's kernel for CPU asks for a multiple of 32 on each of 4 ranks
)

DEEPSEEK: dict[str, Any] = dict(
    arch="deepseek_v3", hidden=128, heads=4, kv_heads=4, layers=3, gain=2.0
)
_LINEAR: dict[str, Any] = dict(
    dtype="bfloat16", hidden=128, heads=4, kv_heads=4, head_dim=128, layers=6, gain=2.0
)
QWEN3_NEXT: dict[str, Any] = dict(_LINEAR, arch="qwen3_next")
_ALL_OF_16: dict[str, Any] = dict(heads=8, experts=16, experts_per_token=16)
NEMOTRON_H: dict[str, Any] = dict(
    arch="nemotron_h", hidden=128, heads=4, kv_heads=4, head_dim=128, layers=8, gain=2.0
)
_VOCAB16: dict[str, Any] = dict(
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=4,
    intermediate=128,
    vocab=16,
    max_position_embeddings=64,
    gain=1.5,
    repeat=1.8,
    phrase=8,
)

_FP8: dict[str, Any] = dict(
    dtype="bfloat16", hidden=256, heads=4, kv_heads=4, head_dim=128, intermediate=512, layers=2
)
_FP8_LATENT: dict[str, Any] = dict(
    _FP8, arch="deepseek_v3", heads=8, kv_heads=8, expert_intermediate=512, gain=2.0
)
_FP8_TILES: dict[str, Any] = dict(_FP8, arch="qwen3", heads=8, intermediate=1024, layers=1)
_FP8_EXPERTS: dict[str, Any] = dict(_FP8, arch="qwen3_moe", expert_intermediate=256)

# What each one is for: see the comment. Everything not named is `make_model`'s default.
SPECS: dict[str, dict[str, Any]] = {
    # Normalised queries and keys; at tp=4 each rank has one of the 4 KV heads.
    "qwen3": dict(arch="qwen3", hidden=128, heads=8, kv_heads=4),
    # The same model with other weights.
    "qwen3_updated": dict(arch="qwen3", hidden=128, heads=8, kv_heads=4, seed=1),
    # The same heads without norms or biases.
    "llama_gqa": dict(arch="llama", hidden=128, heads=8, kv_heads=4),
    # Fewer KV heads than 4 ranks, so vLLM replicates them; a vocabulary that vLLM must pad.
    "llama_few_kv": dict(arch="llama", hidden=96, heads=8, kv_heads=2, vocab=500),
    # One KV head for all: every rank of a wider layout stores a copy of the same KV.
    "llama_one_kv": dict(arch="llama", hidden=64, heads=4, kv_heads=1),
    # Biases on q, k and v, which are sharded (tp=2) and replicated (tp=4) like the KV heads.
    "qwen2": dict(arch="qwen2", hidden=128, heads=4, kv_heads=2),
    "qwen2_updated": dict(arch="qwen2", hidden=128, heads=4, kv_heads=2, seed=1),
    # The output head is the embedding matrix.
    "qwen3_tied": dict(arch="qwen3", hidden=64, heads=8, kv_heads=4, tie=True),
    # Mixtures of experts: one KV head for two ranks at tp=4, ...
    "qwen3_moe": dict(arch="qwen3_moe", hidden=128, heads=4, kv_heads=2, layers=2),
    "qwen3_moe_updated": dict(arch="qwen3_moe", hidden=128, heads=4, kv_heads=2, layers=2, seed=1),
    # ... shared experts with a gate, and experts that do not divide by four, ...
    "qwen2_moe": dict(
        arch="qwen2_moe", hidden=128, heads=4, kv_heads=4, layers=2, experts=6, gain=3.0
    ),
    # ... names of its own in checkpoints, ...
    "mixtral": dict(arch="mixtral", hidden=128, heads=4, kv_heads=4, layers=2),
    # ... norms over all heads, ...
    "olmoe": dict(arch="olmoe", hidden=128, heads=4, kv_heads=4, layers=2),
    # ... a first layer without experts, shared experts, and a bias of the router's choice.
    "glm4_moe": dict(arch="glm4_moe", hidden=128, heads=4, kv_heads=4, layers=2),
    # Latent attention, of two mixtures (see `make_model`): one KV head that is whole on every rank.
    "deepseek_v2": dict(DEEPSEEK, arch="deepseek_v2", layers=2),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3_updated": dict(DEEPSEEK, seed=1),
    # Sliding windows: two layers in three, so that there are four groups of KV caches, ...
    "gemma3": dict(_GEMMA3),
    "gemma3_updated": dict(_GEMMA3, seed=1),
    # ... every second layer, with soft caps of logits, and one KV head at tp=2, ...
    "gemma2": dict(arch="gemma2", heads=4, kv_heads=2, layers=4, tie=True, window=24),
    # ... and all layers: one group; fused matrices in the checkpoint.
    "mistral": dict(arch="mistral", hidden=128, heads=8, kv_heads=4, window=72),
    "phi3": dict(arch="phi3", hidden=128, heads=4, kv_heads=4, window=64),
    # Chunks of two blocks in three of four layers.
    "llama4": dict(arch="llama4_text", hidden=128, heads=8, kv_heads=4, layers=4, window=64),
    # Windows in every second layer, attention sinks, experts with biases.
    "gpt_oss": GPT_OSS,
    "gpt_oss_updated": dict(GPT_OSS, seed=1),
    # Linear attention in two layers of three, in 16 bits, as vLLM's CPU kernels take it: three
    # groups of caches, two of which have a slot for each request; experts and shared ones.
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next_updated": dict(QWEN3_NEXT, seed=1),
    # One KV head for two ranks at tp=4, so that a block is no smaller there than at tp=2.
    "qwen3_next_few_kv": dict(QWEN3_NEXT, kv_heads=2),
    # Mamba2, whose layers alternate with MLPs and attention.
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_updated": dict(NEMOTRON_H, seed=1),
    "nemotron_h_few_kv": dict(NEMOTRON_H, kv_heads=2),
    # Its matrices of queries, keys, values and gates cut each by itself; with experts and without.
    "qwen3_5": dict(_LINEAR, arch="qwen3_5_text"),
    "qwen3_5_updated": dict(_LINEAR, arch="qwen3_5_text", seed=1),
    "qwen3_5_moe": dict(_LINEAR, arch="qwen3_5_moe_text"),
    # Greedy and sampled text goes through one phrase again and again, with interruptions: n-gram
    # drafts are accepted, but not all (see `tests/support/ngram.py`).
    "repeating": dict(arch="qwen3", hidden=128, heads=8, kv_heads=4, repeat=1.2),
    "repeating_updated": dict(arch="qwen3", hidden=128, heads=8, kv_heads=4, repeat=1.2, seed=1),
    # With an MTP module it is a MiMo (see `tests/support/drafters.py`).
    "repeating_qwen2": dict(arch="qwen2", hidden=128, heads=4, kv_heads=2, repeat=1.2),
    "repeating_qwen2_updated": dict(
        arch="qwen2", hidden=128, heads=4, kv_heads=2, repeat=1.2, seed=1
    ),
    # The same with replicated KV heads and a padded vocabulary.
    "repeating_llama": dict(arch="llama", hidden=96, heads=8, kv_heads=2, vocab=500, repeat=1.25),
    # And a mixture of experts.
    "repeating_moe": dict(arch="qwen3_moe", hidden=128, heads=4, kv_heads=2, layers=2, repeat=1.2),
    "repeating_shared": dict(
        arch="qwen2_moe", hidden=128, heads=4, kv_heads=4, layers=2, experts=6, repeat=1.3
    ),
    # And sliding windows: in all layers, shorter than a block; in every second one.
    "repeating_mistral": dict(
        arch="mistral", hidden=128, heads=8, kv_heads=4, window=20, repeat=1.2
    ),
    "repeating_gpt_oss": dict(GPT_OSS, repeat=1.2),
    "repeating_glm": dict(arch="glm4_moe", hidden=128, heads=4, kv_heads=4, layers=2, repeat=1.2),
    "repeating_glm_updated": dict(
        arch="glm4_moe", hidden=128, heads=4, kv_heads=4, layers=2, repeat=1.2, seed=1
    ),
    # And latent attention.
    "repeating_deepseek": dict(DEEPSEEK, repeat=2.2),
    "repeating_deepseek_updated": dict(DEEPSEEK, repeat=2.2, seed=1),
    # And linear attention: text in 16 bits goes on alike for long; ...
    "repeating_next": dict(QWEN3_NEXT, repeat=2.2),
    # ... for 32 bits and an MTP module.
    "interrupted_next": dict(QWEN3_NEXT, repeat=1.2),
    "interrupted_3_5": dict(_LINEAR, arch="qwen3_5_text", repeat=1.2),
    # A draft model for the former, whose KV is as that of its layers with attention.
    "next_draft": dict(
        arch="qwen3", hidden=128, heads=4, kv_heads=4, head_dim=128, layers=1, repeat=1.2
    ),
    "interrupted_next_updated": dict(QWEN3_NEXT, repeat=1.2, seed=1),
    # For GPUs (tests/gpu): heads as wide as those of real models, in 16 bits.
    "wide": dict(WIDE, seed=0),
    "wide_updated": dict(WIDE, seed=1),
    # Of other kinds, as the doctor's: all experts have each token, so that no rounding to 16 bits
    # decides where it goes.
    "moe": dict(_ALL_OF_16, arch="qwen3_moe", kv_heads=4, layers=2, gain=3.0),
    "linear": dict(
        _ALL_OF_16,
        arch="qwen3_next",
        kv_heads=4,
        head_dim=128,
        linear_heads=8,
        gain=0.5,
        dtype="bfloat16",
    ),
    "latent": dict(_ALL_OF_16, arch="deepseek_v3", kv_heads=8, layers=2, head_dim=128, gain=2.0),
    "window": dict(arch="gemma3_text", heads=8, kv_heads=4, tie=True, window=40),
    "sinks": dict(GPT_OSS, experts_per_token=8, gain=2.0),
    # To be quantized to fp8 (see `FP8`), by vLLM or in the checkpoint: few KV heads at tp=4, ...
    "fp8": dict(_FP8, arch="qwen3", kv_heads=2),
    "fp8_updated": dict(_FP8, arch="qwen3", kv_heads=2, seed=1),
    # ... biases, ...
    "fp8_biased": dict(_FP8, arch="qwen2", hidden=512),
    "fp8_biased_updated": dict(_FP8, arch="qwen2", hidden=512, seed=1),
    # ... experts, latent attention.
    "fp8_moe": _FP8_EXPERTS,
    "fp8_moe_updated": dict(_FP8_EXPERTS, seed=1),
    "fp8_latent": _FP8_LATENT,
    "fp8_latent_updated": dict(_FP8_LATENT, seed=1),
    # For Marlin: every rank of four has whole tiles of q, k and v each, and at least two blocks of
    # 128 columns; the second one with biases.
    "fp8_tiles": _FP8_TILES,
    "fp8_tiles_updated": dict(_FP8_TILES, seed=1),
    "fp8_tiles_bias": dict(_FP8, arch="qwen2", hidden=512, heads=8, layers=1, gain=3.0),
    # For schedulers of eight ranks, which only read its config.
    "eight_kv_heads": dict(arch="qwen3", heads=8, kv_heads=8, max_position_embeddings=16_384),
    # So few tokens that the law of sampled text can be computed. Most likely goes on in its phrase.
    "vocab16": dict(_VOCAB16, arch="qwen3"),
    "vocab16_qwen2": dict(_VOCAB16, arch="qwen2", heads=2, kv_heads=2),
}
# The same, quantized: every rank of four has whole blocks of 128 x 128, but of experts.
FP8: dict[str, tuple[str, Any]] = {
    f"{name}_{by.__name__.removeprefix('by_')}{updated}": (name + updated, by)
    for name in ("fp8", "fp8_moe", "fp8_latent", "fp8_tiles")
    for by in (by_blocks, by_channels, by_tensors, by_modelopt)
    for updated in ("", "_updated")
}
LATENT = [name for name, spec in SPECS.items() if spec["arch"] in LATENT_ARCHS]
LATENT += [name for name, (spec, _) in (*FP8.items(), *DRAFTERS.items()) if spec in LATENT]
REPEATING = [name for name, spec in SPECS.items() if "repeat" in spec]


def phrase(name: str, tokens: int, start: int = 0) -> list[int]:
    """So many tokens of the phrase of a model in `REPEATING`, from its token number `start` on."""
    first, size = len(SPECIAL_TOKENS), SPECS[name].get("phrase", 16)
    return [first + (start + i) % size for i in range(tokens)]


def random_model(name: str) -> Path:
    """Directory of a checkpoint of `SPECS`, `DRAFTERS` or `vision.CLASSES`, built on the first
    call.

    It is kept under `PAT_TEST_MODELS`, or in a directory of this user's under the system's
    temporary one. Several processes may ask for the same model at once.
    """
    if name in vision.CLASSES:
        text, _, finish = vision.CLASSES[name]
        return kept_model(cache_dir(), name, SPECS[text], finish)
    if name in DRAFTERS:
        spec, finish = DRAFTERS[name]
        return kept_model(cache_dir(), name, SPECS[spec], finish)
    if name in FP8:
        spec, finish = FP8[name]
        return kept_model(cache_dir(), name, SPECS[spec], finish)
    if name not in SPECS:
        raise ValueError(f"no test model {name!r}: choose from {', '.join(SPECS)}")
    return kept_model(cache_dir(), name, SPECS[name])


def cache_dir() -> Path:
    """Where test models are kept, and what stock vLLM generated with them."""
    default = Path(tempfile.gettempdir()) / f"pat-vllm-models-{os.getuid()}"
    path = Path(os.environ.get("PAT_TEST_MODELS") or default)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path.resolve()

"""Engines that tests share.

Each axis (model runner, weights in place or copied, drafts, experts cut or spread, few KV heads,
two or four ranks, local processes or Ray) meets each other one on at least one of these engines or
of those that tests start for themselves; whole products are in `tests/nightly`.
"""

from __future__ import annotations

from typing import Any

from tests.support.counting import REASONING
from tests.support.pool import EngineSpec

MIGRATE = {"kv_transfer": "migrate"}
IN_PLACE = MIGRATE | {"weights": "inplace"}
UPDATES: dict[str, Any] = {
    "worker_extension_cls": "tests.support.updates_by_layer.UpdatesByLayer",
    "weight_transfer_config": {"backend": "sockets"},  # tests/support/weight_transfer.py
}
# On CPU vLLM cannot prefill a seeded request in chunks ("CPU Generator does not use offset").
WHOLE_PROMPTS = {"max_num_batched_tokens": 1000}
CHUNK = 96
"""Tokens; with `FEATURES`, longer prompts are prefilled in chunks; a switch may come in between."""
FEATURES: dict[str, Any] = {
    "disable_log_stats": False,
    "scheduling_policy": "priority",
    "max_num_batched_tokens": 1200,
    "long_prefill_token_threshold": CHUNK,
    "max_logprobs": 8,
    # Random models generate white space without end.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    "reasoning_config": REASONING,
}
# vLLM refuses them beside speculation.
PROCESSORS = {
    "logits_processors": [
        f"tests.support.logits_processors:{name}" for name in ("StepCounter", "OfEachRequest")
    ]
}

DENSE = EngineSpec("dense", "qwen3", 2, MIGRATE, FEATURES | PROCESSORS)
CUT, SPREAD = ({"experts": kind} for kind in ("tp", "ep"))
MIXTURE, SPREAD_MIXTURE = (
    EngineSpec(f"mixture{name}", "qwen3_moe", 2, IN_PLACE | experts, UPDATES | WHOLE_PROMPTS)
    for name, experts in (("", CUT), (", spread", SPREAD))
)
FOUR_RANKS = EngineSpec("four ranks", "qwen3", 4, IN_PLACE, UPDATES | WHOLE_PROMPTS)
# Weights with a scale for each block, taken apart in 32 bits: layouts differ by rounding alone.
FP8 = EngineSpec("fp8", "fp8_blocks", 4, IN_PLACE, UPDATES | WHOLE_PROMPTS)
FP8_MIXTURE = EngineSpec(
    "fp8 mixture", "fp8_moe_blocks", 2, IN_PLACE | CUT, UPDATES | WHOLE_PROMPTS
)
# Quantized when loaded, or in the checkpoint, with activations in fp8.
FP8_ONLINE, FP8_CHANNELS = (
    EngineSpec(name, model, ranks, IN_PLACE, WHOLE_PROMPTS | {"dtype": "bfloat16"} | options)
    for name, model, ranks, options in (
        ("fp8 online", "fp8", 4, {"quantization": "fp8_per_channel"}),
        ("fp8 channels", "fp8_channels", 2, {}),
    )
)
FEW_KV_HEADS = EngineSpec(
    "few KV heads", "llama_few_kv", 4, IN_PLACE | {"base_tp": 2}, WHOLE_PROMPTS
)
# As where a trainer names the backend, and PAT is asked for by its option.
COPIES = EngineSpec(
    "copies",
    "qwen3",
    2,
    MIGRATE | {"weights": "materialized", "enabled": True},
    UPDATES
    | WHOLE_PROMPTS
    | {
        "distributed_executor_backend": "mp",
        "weight_transfer_config": {"backend": "files"},  # in place of CUDA IPC
    },
)
# Four groups of KV caches, three of them of sliding windows of a block and a quarter.
# By default vLLM keeps of a window only what the prompt's end needs; here of each block's.
WINDOWS = EngineSpec(
    "windows",
    "gemma3",
    2,
    MIGRATE | {"weights": "materialized"},
    WHOLE_PROMPTS | {"prefix_cache_retention_interval": 32},
)
# A state that both ranks have whole; prompts in chunks (see `tests/support/latent_in_chunks.py`).
LATENT = EngineSpec("latent", "deepseek_v3", 2, IN_PLACE, UPDATES | WHOLE_PROMPTS)
# Linear attention, with a slot for each request; plain torch computes it in float32.
WITHOUT_CACHE: dict[str, Any] = WHOLE_PROMPTS | {"enable_prefix_caching": False}
LINEAR = EngineSpec("linear", "qwen3_next", 2, IN_PLACE | SPREAD, UPDATES | WITHOUT_CACHE)
# Text alone of a class for images.
LINEAR_TEXT = EngineSpec("linear text", "qwen3_5_moe_vl", 2, IN_PLACE, WITHOUT_CACHE)
# The same with prefix caching: a state for each block of 64 tokens. Prompts come in chunks then.
LINEAR_CACHED = EngineSpec(
    "linear, cached", "qwen3_next", 2, IN_PLACE, {"max_num_batched_tokens": 400}
)
# Mamba2, in float32 by vLLM's kernels, with and without.
MAMBA = EngineSpec("Mamba2", "nemotron_h", 2, IN_PLACE, UPDATES | WITHOUT_CACHE)
MAMBA_CACHED = EngineSpec(
    "Mamba2, cached",
    "nemotron_h",
    2,
    MIGRATE | {"weights": "materialized"},
    {"max_num_batched_tokens": 400},
)
# And by vLLM's kernels, in 16 bits.
IN_16_BITS: dict[str, Any] = WITHOUT_CACHE | {"dtype": "bfloat16"}
LINEAR_PACKED = EngineSpec(
    "linear, packed", "repeating_next", 2, MIGRATE | {"weights": "materialized"}, IN_16_BITS
)
# Text alone of a class for images, whose positions are threefold, and published names its own.
VISION = EngineSpec("vision", "qwen2_5_vl", 2, IN_PLACE, UPDATES | WHOLE_PROMPTS)
# With its images: a prompt comes in parts, some of which end within an image.
OF_IMAGES: dict[str, Any] = {
    "language_model_only": False,
    "limit_mm_per_prompt": {"image": 4, "video": 1},
    "long_prefill_token_threshold": 48,
    "max_num_batched_tokens": 1000,
}
IMAGES = EngineSpec("images", "qwen2_5_vl", 2, IN_PLACE, UPDATES | OF_IMAGES)
IMAGES_V2 = EngineSpec(
    "images, V2", "qwen3_vl", 2, IN_PLACE, UPDATES | OF_IMAGES, model_runner_v2=True
)
# KV in 8 bits, of both kinds; and windows with it.
FP8_KV, FP8_WINDOWS = (
    EngineSpec(
        f"fp8 KV{name}",
        model,
        2,
        MIGRATE | {"weights": weights},
        options | WHOLE_PROMPTS | {"kv_cache_dtype": dtype},
    )
    for name, model, weights, dtype, options in (
        ("", "qwen3", "inplace", "fp8_e5m2", UPDATES),
        (" and windows", "gemma3", "materialized", "fp8", {}),
    )
)
# Pools of 24 blocks: a group of two, with one KV head for both ranks, holds no more than a replica.
SMALL_KV = EngineSpec(
    "small KV", "llama_one_kv", 2, MIGRATE, {"kv_cache_memory_bytes": 24 * 3 * 32 * (2 * 32 * 4)}
)
# The same of latent attention, with packed weights: 48 blocks.
SMALL_LATENT = EngineSpec(
    "small latent",
    "deepseek_v3",
    2,
    MIGRATE,
    {"kv_cache_memory_bytes": 48 * 3 * 16 * (512 + 64) * 4},
)
# Profiles are kept in `PAT_CACHE_DIR`, which `tests/engine/test_policy.py` sets.
POLICY = EngineSpec(
    "policy",
    "qwen3_moe",
    2,
    {"policy": {"kind": "predictor", "idle_seconds": 0}, "weights": "inplace"} | SPREAD,
    {"disable_log_stats": False},
)

NGRAM: dict[str, Any] = {
    "method": "ngram",
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
    "num_speculative_tokens": 4,
}
"""Keeps the draft lengths 0, 1, 2 and 4 ready."""
# Of tp=1: about 4,000 tokens a replica.
DRAFTS_OPTIONS: dict[str, Any] = FEATURES | {"kv_cache_memory_bytes": 12 << 20}
# One draft token, unless another length is asked for.
USUALLY_ONE: dict[str, Any] = {
    "speculative_config": NGRAM | {"num_speculative_tokens_per_batch_size": [(1, 512, 1)]}
}
DRAFTS = EngineSpec("drafts", "repeating", 2, MIGRATE, DRAFTS_OPTIONS | USUALLY_ONE)
# A batch of 500 responses at once, by a model of 16 tokens.
LAW = EngineSpec(
    "law",
    "vocab16",
    2,
    MIGRATE,
    {
        "speculative_config": NGRAM,
        "max_model_len": 64,
        "max_num_seqs": 500,
        "max_num_batched_tokens": 500 * 32,
        "kv_cache_memory_bytes": 128 << 20,
    },
)
# Model Runner V2 in Triton's interpreter, two steps in flight, as on CUDA.
V2_CHUNK = 48
"""Tokens of a step, one and a half blocks: a longer prompt takes several steps."""
V2_OPTIONS: dict[str, Any] = UPDATES | {
    "structured_outputs_config": FEATURES["structured_outputs_config"],
    "reasoning_config": REASONING,
    "max_model_len": 256,
    "max_num_batched_tokens": V2_CHUNK,
}
V2 = EngineSpec(
    "V2",
    "qwen3",
    4,
    IN_PLACE,
    # The threshold: so that wider layouts, with more tokens, have prompts in chunks, too.
    V2_OPTIONS
    | {
        "max_num_seqs": 10,
        "long_prefill_token_threshold": V2_CHUNK,
        "logits_processors": ["tests.support.slot_processor:SlotCounter"],
    },
    model_runner_v2=True,
)
# A state that all ranks have whole; and linear attention, with a state for each block of 64 tokens.
V2_LATENT, V2_LINEAR = (
    EngineSpec(
        f"V2 {name}",
        model,
        2,
        IN_PLACE,
        {**V2.options, "max_num_batched_tokens": tokens},
        model_runner_v2=True,
    )
    for name, model, tokens in (("latent", "deepseek_v3", V2_CHUNK), ("linear", "qwen3_5_vl", 96))
)
# None, unless a length is asked for.
V2_NGRAM: dict[str, Any] = {
    "method": "ngram_gpu",
    "num_speculative_tokens": 3,
    "num_speculative_tokens_per_batch_size": [(1, 512, 0)],
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 3,
}
# Drafters with weights. What the model itself drafts is right, as long as its KV is whole. Beside
# MTP, with V2, text drafts for some requests.
SELF_DRAFTS, MTP, EAGLE3, V2_SELF_DRAFTS, V2_MTP, V2_EAGLE3 = (
    EngineSpec(
        f"{runner} {method}",
        model,
        2,
        IN_PLACE | {"draft_history_bytes": history},
        V2_OPTIONS | {"max_num_seqs": 8, "speculative_config": {"method": method, **drafter}},
        model_runner_v2=runner == "V2",
    )
    for runner in ("V1", "V2")
    for method, model, drafter, history in (
        ("draft_model", "qwen3", {"model": "qwen3", "num_speculative_tokens": 3}, 0),
        ("mtp", "mimo", {"num_speculative_tokens": 2}, 1 << 20),
        ("eagle3", "repeating", {"model": "eagle3", "num_speculative_tokens": 2}, 0),
    )
)
# And of linear attention, with slots for drafts.
MTP_LINEAR = EngineSpec(
    "V2 mtp of linear attention",
    "qwen3_next_mtp",
    2,
    IN_PLACE | CUT,
    {**V2_MTP.options, "max_num_batched_tokens": 96},
    model_runner_v2=True,
)
# Without prefix caching, these are all that a request has.
NGRAM_LINEAR = EngineSpec(
    "V2 n-grams of linear attention",
    "qwen3_next_mtp",
    2,
    IN_PLACE | SPREAD,
    {**MTP_LINEAR.options, "speculative_config": V2_NGRAM, "enable_prefix_caching": False},
    model_runner_v2=True,
)
V2_DRAFTS = EngineSpec(
    "V2 drafts of a mixture",
    "repeating_moe",
    2,
    IN_PLACE | CUT,
    V2_OPTIONS | {"max_num_seqs": 12, "speculative_config": V2_NGRAM},
    model_runner_v2=True,
)

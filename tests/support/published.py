"""Shape fields of published `config.json`s, as their files have them, and sizes of the models."""

from __future__ import annotations

from typing import Any

_GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
_OLMO_LAYERS = [*["sliding_attention"] * 3, "full_attention"] * 8

SIZES: dict[str, tuple[float, dict[str, Any]]] = {
    "Kimi-K2-bf16": (
        1026,
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "vocab_size": 163840,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": False,
        },
    ),
    "Mistral-Small-24B": (
        23.57,
        {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 131072,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    ),
    "OLMo-3-7B": (
        7.3,
        {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100278,
            "sliding_window": 4096,
            "layer_types": _OLMO_LAYERS,
            "tie_word_embeddings": False,
        },
    ),
    "Phi-4": (
        14.66,
        {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "vocab_size": 100352,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
    ),
    "Qwen2.5-7B": (7.62, _QWEN),
    "Seed-OSS-36B": (
        36.15,
        {
            "architectures": ["SeedOssForCausalLM"],
            "model_type": "seed_oss",
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 155136,
            "tie_word_embeddings": False,
        },
    ),
    "SmolLM3-3B": (
        3.08,
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
    "pythia-6.9b": (
        6.86,
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "model_type": "gpt_neox",
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 50432,
            "tie_word_embeddings": False,
        },
    ),
    # Text alone. 12.2 billion of the smaller one are with its tower and projector: 27 layers of
    # 4 x 1152 x 1152 and 2 x 1152 x 4304 weights, and their embeddings, 0.42 billion.
    "gemma-3-12b": (
        12.2 - 0.42,
        {
            **_GEMMA,
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "num_attention_heads": 16,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "sliding_window": 1024,
            },
        },
    ),
    "gemma-3-27b": (
        27.0,
        {
            **_GEMMA,
            "text_config": {
                "model_type": "gemma3_text",
                "head_dim": 128,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "sliding_window": 1024,
            },
        },
    ),
}
"""Billions of parameters by the models' cards, and the config."""

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "awq-checkpoint": (
        "quantization='awq' (allowed: None, fp8, ",
        {
            **_QWEN,
            "quantization_config": {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 128,
                "zero_point": True,
            },
        },
    ),
    "bge-like": (
        "runner='pooling' (allowed: generate)",
        {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "vocab_size": 30522,
        },
    ),
    "Granite-4.0-H-Micro": (
        "a hybrid or Mamba model, but for Gated DeltaNet and Nemotron-H's Mamba2",
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "shared_intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 100352,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["mamba" if i % 10 != 5 else "attention" for i in range(40)],
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "tie_word_embeddings": True,
        },
    ),
    "Jamba-Reasoning-3B": (
        "a hybrid or Mamba model, but for Gated DeltaNet and Nemotron-H's Mamba2",
        {
            "architectures": ["JambaForCausalLM"],
            "model_type": "jamba",
            "hidden_size": 2560,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 20,
            "num_key_value_heads": 1,
            "vocab_size": 65536,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "attn_layer_period": 14,
            "attn_layer_offset": 7,
            "mamba_d_state": 16,
            "tie_word_embeddings": True,
        },
    ),
}
"""Words of what an engine with PAT says, and the config."""

"""What the config.json of a random model says, by architecture. Pure."""

from __future__ import annotations

from typing import Any

from pat_vllm.cli.command_options import RandomModel

ARCHS = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    # Sliding windows: in all layers, in every second one, in two of three.
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    # Mixtures of experts.
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    # Chunked attention in three layers of four; without experts.
    "llama4_text": "Llama4ForCausalLM",
    # Both: windows in every second layer.
    "gpt_oss": "GptOssForCausalLM",
    # Latent attention, and a mixture whose first layer is dense.
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    # Linear attention in two layers of three; with experts, but for one.
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    # Mamba2 in two layers of four, then an MLP and attention.
    "nemotron_h": "NemotronHForCausalLM",
}
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
WINDOWS = ("mistral", "phi3", "gemma2", "gemma3_text", "gpt_oss")
LATENT = ("deepseek_v2", "deepseek_v3")
KV_RANK, ROPE_DIM = 512, 64
"""Of latent attention. vLLM has no kernel on CPU for others."""
EXPERT_GROUPS = 2
"""Of models with latent attention, whose router chooses a group first."""


def fields_of(model: RandomModel) -> dict[str, Any]:
    """What an architecture's config says beside the sizes that all have."""
    return (
        {"intermediate_size": model.intermediate}
        | _heads(model)
        | _windows(model)
        | _linear_attention(model)
        | _mamba(model)
        | _mixture(model)
    )


def _heads(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its heads beside their number."""
    if model.arch not in LATENT:
        return {"head_dim": model.head_dim}
    longest = model.max_position_embeddings
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "mscale": 0.707}
    scaled |= {"mscale_all_dim": 0.707, "original_max_position_embeddings": max(1, longest // 2)}
    return {
        "q_lora_rank": None if model.arch == "deepseek_v2" else max(1, model.hidden // 2),
        "kv_lora_rank": KV_RANK,
        "qk_rope_head_dim": ROPE_DIM,
        "qk_nope_head_dim": model.head_dim,
        "v_head_dim": model.head_dim,
        # With plain positions, what vLLM computes of a token on CPU depends on the others of its
        # step, and on how they are batched.
        "rope_parameters": scaled,
    }


def _windows(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its sliding windows or chunks, if it has some."""
    if model.arch == "llama4_text":
        return {
            "attention_chunk_size": model.window,
            "intermediate_size_mlp": model.intermediate,
            "moe_layers": [],
            "interleave_moe_layer_step": model.layers + 1,
        }
    if model.arch not in WINDOWS:
        return {}
    config: dict[str, Any] = {"sliding_window": model.window}
    if every := {"gemma2": 2, "gemma3_text": 3, "gpt_oss": 2}.get(model.arch):
        kinds = ["sliding_attention"] * (every - 1) + ["full_attention"]
        config["layer_types"] = [kinds[layer % every] for layer in range(model.layers)]
    if model.arch.startswith("gemma"):
        config["query_pre_attn_scalar"] = model.head_dim
    return config


def _linear_attention(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its layers with linear attention, if it has some."""
    if model.arch not in LINEAR:
        return {}
    kinds = ["linear_attention"] * 2 + ["full_attention"]
    return {
        "layer_types": [kinds[layer % 3] for layer in range(model.layers)],
        "linear_num_key_heads": model.linear_heads,
        "linear_num_value_heads": 2 * model.linear_heads,
        "linear_key_head_dim": 64,  # vLLM's CPU kernels take no narrower ones
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    }


def _mamba(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its layers with Mamba2, if it has some."""
    if model.arch != "nemotron_h":
        return {}
    kinds = ["linear_attention", "linear_attention", "mlp", "full_attention"]
    return {
        "layers_block_type": [kinds[layer % 4] for layer in range(model.layers)],
        "n_groups": model.linear_heads,
        "mamba_num_heads": 2 * model.linear_heads,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "conv_kernel": 4,
        "time_step_min": 1e-9,  # transformers takes no shorter steps, vLLM does
    }


def _mixture(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its experts, if it has some."""
    experts, width = model.experts, model.expert_intermediate
    common: dict[str, Any] = {"num_experts_per_tok": model.experts_per_token}
    # In two groups, of which a token goes to one.
    deepseek = common | {"n_routed_experts": experts, "moe_intermediate_size": width}
    deepseek |= {"first_k_dense_replace": 1, "n_group": EXPERT_GROUPS, "topk_group": 1}
    return {
        "qwen3_moe": common
        | {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": True},
        "qwen2_moe": common
        | {"num_experts": experts, "moe_intermediate_size": width}
        | {"shared_expert_intermediate_size": model.intermediate},
        "qwen3_next": common
        | {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": model.intermediate},
        "qwen3_5_moe_text": common
        | {"num_experts": experts, "moe_intermediate_size": width}
        | {"shared_expert_intermediate_size": model.intermediate},
        "mixtral": common | {"num_local_experts": experts, "intermediate_size": width},
        "olmoe": common | {"num_experts": experts, "intermediate_size": width},
        "glm4_moe": common
        | {"n_routed_experts": experts, "moe_intermediate_size": width, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
        "deepseek_v2": deepseek
        | {"n_shared_experts": 2, "topk_method": "group_limited_greedy"}
        | {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 2.0},
        "deepseek_v3": deepseek
        | {"n_shared_experts": 1, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
        | {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "gpt_oss": common
        | {"num_local_experts": experts, "intermediate_size": width}
        | {"rope_parameters": _yarn(model.max_position_embeddings)},
    }.get(model.arch, {})


def _yarn(longest: int) -> dict[str, Any]:
    """Of a model that was trained with contexts of half the length."""
    return {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 2.0,
        "original_max_position_embeddings": max(1, longest // 2),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }

"""The random models of tests and benchmarks: what their config.json says, by architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pat_vllm.doctor.models import Weights

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


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A random checkpoint.

    Attributes:
        hidden: width of the residual stream.
        head_dim: width of one head; vLLM's kernels for CPU take 32, 64, 80, 96, 112, 128 and
            larger ones.
        dtype: of the weights: float32, bfloat16 or float16.
        tie: whether the output head is the embeddings.
        window: tokens of a sliding window, or of a chunk of attention.
        linear_heads: key heads of linear attention, groups of Mamba2.
        experts: of a mixture, in each layer; a token goes to `experts_per_token` of them.
        gain, repeat, phrase, seed: of the weights (`pat_vllm.doctor.models.Weights`).
    """

    arch: str = "qwen3"
    hidden: int = 128
    layers: int = 3
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 256
    vocab: int = 512
    dtype: str = "float32"
    max_position_embeddings: int = 2048
    tie: bool = False
    window: int = 64
    linear_heads: int = 4
    experts: int = 8
    experts_per_token: int = 2
    expert_intermediate: int = 64
    gain: float = Weights.gain
    repeat: float = Weights.repeat
    phrase: int = Weights.phrase
    seed: int = Weights.seed

    @property
    def weights(self) -> Weights:
        return Weights(self.gain, self.repeat, self.phrase, self.seed)


def config_of(model: RandomModel) -> dict[str, Any]:
    """Its config.json. Where the architecture has no layers of some kind, it says nothing of
    them."""
    return (
        {
            "architectures": [ARCHS[model.arch]],
            "model_type": model.arch,
            "dtype": model.dtype,
            "hidden_size": model.hidden,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "intermediate_size": model.intermediate,
            "vocab_size": model.vocab,
            "max_position_embeddings": model.max_position_embeddings,
            "tie_word_embeddings": model.tie,
        }
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
    return {
        "q_lora_rank": None if model.arch == "deepseek_v2" else max(1, model.hidden // 2),
        "kv_lora_rank": KV_RANK,
        "qk_rope_head_dim": ROPE_DIM,
        "qk_nope_head_dim": model.head_dim,
        "v_head_dim": model.head_dim,
        # With plain positions, what vLLM computes of a token on CPU depends on the others of its
        # step, and on how they are batched.
        "rope_parameters": _yarn(model, 10000.0) | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }


def _yarn(model: RandomModel, theta: float) -> dict[str, Any]:
    """Positions of a model that was trained with contexts of half the length."""
    trained = max(1, model.max_position_embeddings // 2)
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": 2.0,
        "original_max_position_embeddings": trained,
    }


def _windows(model: RandomModel) -> dict[str, Any]:
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
    experts, width = model.experts, model.expert_intermediate
    common: dict[str, Any] = {"num_experts_per_tok": model.experts_per_token}
    local = common | {"num_local_experts": experts, "intermediate_size": width}
    qwen = common | {"num_experts": experts, "moe_intermediate_size": width}
    shared = qwen | {"shared_expert_intermediate_size": model.intermediate}
    routed = common | {"n_routed_experts": experts, "moe_intermediate_size": width}
    routed |= {"first_k_dense_replace": 1}
    yarn = _yarn(model, 150000.0)
    # In two groups, of which a token goes to one if that has as many experts as it takes.
    groups = -(-model.experts_per_token * EXPERT_GROUPS // experts)
    deepseek = routed | {"n_group": EXPERT_GROUPS, "topk_group": groups}
    return {
        "qwen3_moe": qwen | {"norm_topk_prob": True},
        "qwen2_moe": shared,
        "qwen3_next": shared | {"norm_topk_prob": True},
        "qwen3_5_moe_text": shared,
        "mixtral": local,
        "olmoe": common | {"num_experts": experts, "intermediate_size": width},
        "glm4_moe": routed | {"n_shared_experts": 1, "num_nextn_predict_layers": 0},
        "deepseek_v2": deepseek
        | {"n_shared_experts": 2, "topk_method": "group_limited_greedy"}
        | {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 2.0},
        "deepseek_v3": deepseek
        | {"n_shared_experts": 1, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
        | {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "gpt_oss": local
        | {"rope_parameters": yarn | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
    }.get(model.arch, {})

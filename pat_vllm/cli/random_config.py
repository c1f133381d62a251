"""What can be said of a random model, and what its config.json says, by architecture. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from pat_vllm.cli.ranges import Ranged

_MOST_WIDTH, _MOST_HEADS = 1 << 18, 1 << 12

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
class RandomModel(Ranged):
    """A random checkpoint: each field is an option of the command, with what its help says."""

    arch: Annotated[
        str,
        typer.Option(
            help="qwen3, qwen2, llama; with sliding windows: mistral, phi3, gemma2, gemma3_text; "
            "chunked attention: llama4_text; "
            "mixtures of experts: qwen3_moe, qwen2_moe, mixtral, olmoe, glm4_moe; both: gpt_oss; "
            "linear attention: qwen3_next, qwen3_5_text, qwen3_5_moe_text; Mamba2: nemotron_h; "
            "latent attention and a mixture: deepseek_v2, deepseek_v3."
        ),
    ] = "qwen3"
    hidden: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="Width of the residual stream.")
    ] = 128
    layers: Annotated[int, typer.Option(min=1, max=1 << 10, help="Number of decoder layers.")] = 3
    heads: Annotated[int, typer.Option(min=1, max=_MOST_HEADS, help="Query heads.")] = 8
    kv_heads: Annotated[int, typer.Option(min=1, max=_MOST_HEADS, help="Key/value heads.")] = 4
    head_dim: Annotated[
        int,
        typer.Option(
            min=1,
            max=1 << 12,
            help="Width of one head; on CPU vLLM has 32, 64, 80, 96, 112, 128 and larger ones.",
        ),
    ] = 32
    intermediate: Annotated[int, typer.Option(min=1, max=_MOST_WIDTH, help="Width of the MLP.")] = (
        256
    )
    vocab: Annotated[
        int,
        typer.Option(min=4, max=1 << 20, help="Tokens of the vocabulary; 259 encode any text."),
    ] = 512
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    max_position_embeddings: Annotated[
        int, typer.Option(min=1, max=1 << 24, help="Longest context, tokens.")
    ] = 2048
    tie: Annotated[bool, typer.Option(help="Tie the output head to the embeddings.")] = False
    window: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of a sliding window.")] = (
        64
    )
    linear_heads: Annotated[
        int,
        typer.Option(
            min=1, max=_MOST_HEADS, help="Key heads of linear attention, groups of Mamba2."
        ),
    ] = 4
    experts: Annotated[
        int, typer.Option(min=1, max=1 << 12, help="Of a mixture, in each layer.")
    ] = 8
    experts_per_token: Annotated[int, typer.Option(min=1, max=1 << 12, help="Of a mixture.")] = 2
    expert_intermediate: Annotated[
        int, typer.Option(min=1, max=_MOST_WIDTH, help="Width of an expert.")
    ] = 64
    # A linear weight has standard deviation gain / sqrt(fan_in), so unit-variance input gives
    # output of standard deviation gain whatever the width: 0.35 per weight at hidden 128.
    # Initialisation for training (0.02) leaves logits so flat that float32 rounding can change an
    # argmax.
    gain: Annotated[
        float,
        typer.Option(
            min=0,
            max=1000,
            help="About the standard deviation of the logits; smaller is flatter.",
        ),
    ] = 4.0
    repeat: Annotated[
        float,
        typer.Option(
            min=0,
            max=1000,
            help="How much its text repeats a phrase; 0: never, 1.5: mostly.",
        ),
    ] = 0.0
    phrase: Annotated[int, typer.Option(min=2, max=1 << 16, help="Tokens of that phrase.")] = 16
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Of the weights.")] = 0


def fields_of(model: RandomModel) -> dict[str, Any]:
    """What an architecture's config says beside the sizes that all have. Each part is empty where
    the architecture has no such layers."""
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

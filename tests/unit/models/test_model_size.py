"""Sizes of models from their config.json."""

from __future__ import annotations

from typing import Any

import pytest

from pat_vllm.layout import Layout
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.layer_sizes import experts_of, text_of
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.quantization import PLAIN, Quantized

QWEN3 = {**MODEL_SHAPES["qwen3-30b-a3b"]}
MISTRAL = {**MODEL_SHAPES["qwen3-8b"], "model_type": "mistral", "num_hidden_layers": 48}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 48),
        ({"mlp_only_layers": [0, 5, 47]}, 45),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1]}, 23),
        ({"model_type": "glm4_moe", "first_k_dense_replace": 3}, 45),
    ],
)
def test_layers_with_experts(fields: dict[str, Any], expected: int) -> None:
    size = ModelSize.of({**QWEN3, **fields})
    assert size.experts is not None
    assert (size.experts.layers, size.dense_layers) == (expected, 48 - expected)


def test_a_class_counts_and_not_its_model_type() -> None:
    """Kimi K2's is DeepSeek V3's. MLPs have a gate or none by the class, too."""
    latent = {**MODEL_SHAPES["deepseek-v2-lite"], "architectures": ["DeepseekV3ForCausalLM"]}
    assert ModelSize.of({**latent, "model_type": "kimi_k2"}) == ModelSize.of(latent)
    gated = ModelSize.of(MISTRAL)
    plain = ModelSize.of({**MISTRAL, "architectures": ["Starcoder2ForCausalLM"]})
    assert gated.layer_weights(2) - plain.layer_weights(2) == 48 * 4096 * 12288 / 2
    layouts = [Layout.of(tp, 2) for tp in (1, 2)]
    assert plain.swap_table_bytes(layouts) < gated.swap_table_bytes(layouts)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "dbrx"},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"architectures": ["LlamaOfMineForCausalLM"]},
    ],
)
def test_of_a_class_that_is_not_known_nothing_is_computed(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"sizes of .* are not known; known are LlamaForCausalLM"):
        ModelSize.of({**MODEL_SHAPES["llama-3.1-8b"], **fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "qwen3"}, "has num_experts: of Qwen3ForCausalLM, no sizes of a mixture"),
        ({"num_experts_per_tok": None}, "or num_experts_per_tok is missing"),
        ({"num_experts_per_tok": 129}, "1 to 128 experts, not to 129"),
        (
            {"model_type": "qwen3_next", "linear_num_key_heads": 2, "full_attention_interval": 64},
            "linear attention in all",
        ),
        ({"hidden_size": None, "vocab_size": 0}, "has no hidden_size, vocab_size"),
    ],
)
def test_what_cannot_be_modelled_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelSize.of({**QWEN3, **fields})


@pytest.mark.parametrize(
    ("name", "billions", "layers"),
    [("qwen3-next-80b-a3b", 79.67, (48, 12)), ("qwen3.5-35b-a3b", 34.66, (40, 10))],
)
def test_layers_with_linear_attention(name: str, billions: float, layers: tuple[int, int]) -> None:
    """All weights but norms and what predicts several tokens, as published."""
    size = ModelSize.of(MODEL_SHAPES[name])
    assert size.resident_weights(1) / 1e9 == pytest.approx(billions, abs=0.01)
    assert (size.layers, size.attention_layers) == layers
    assert size.divides(2) and size.divides(16) and not size.divides(32)
    named = ["linear_attention"] * (layers[0] - layers[1]) + ["full_attention"] * layers[1]
    assert ModelSize.of({**MODEL_SHAPES[name], "layer_types": named}) == size
    for tp in (2, 4, 8):
        replicated = 2 * layers[1] * size.hidden * size.head_dim * (max(1, 2 / tp) - 2 / tp)
        shard = size.resident_weights(tp) - replicated
        routers = layers[0] * size.hidden * (size.experts.count + 1) if size.experts else 0
        assert shard - routers == pytest.approx((size.resident_weights(1) - routers) / tp)


NEMOTRON_H_8B = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
}
"""The shape fields of its public config.json."""


def test_layers_with_mamba2() -> None:
    """Each layer has one thing. All weights but norms, biases and what a head has, as published."""
    size = ModelSize.of(NEMOTRON_H_8B)
    assert size.resident_weights(1) / 1e9 == pytest.approx(8.10, abs=0.01)
    assert (size.layers, size.attention_layers, size.dense_layers) == (52, 4, 24)
    assert size.linear is not None and size.linear.layers == 24 and size.depth == 26
    assert size.divides(2) and size.divides(8) and not size.divides(16)
    assert size.resident_weights(8) * 8 == size.resident_weights(1)
    # A convolution's three tokens of x, B and C in 16 bits, and a matrix for each head in 32.
    assert size.linear.state_bytes(2) == 3 * (8192 + 2 * 1024) * 2 + 128 * 64 * 128 * 4
    # As transformers has it, with sizes of experts that no layer has; with experts it is another.
    kinds = {"M": "mamba", "-": "mlp", "*": "attention"}
    named: dict[str, Any] = {**NEMOTRON_H_8B, "n_routed_experts": 8, "num_experts_per_tok": 2}
    named["layers_block_type"] = [kinds[letter] for letter in named.pop("hybrid_override_pattern")]
    assert ModelSize.of(named) == size and experts_of(named | {"moe_intermediate_size": 64}) is None
    nano = ModelSize.of(MODEL_SHAPES["nemotron-nano-9b-v2"])
    assert nano.resident_weights(1) / 1e9 == pytest.approx(8.89, abs=0.01)
    assert (nano.layers, nano.attention_layers, nano.dense_layers) == (56, 4, 25)
    with pytest.raises(ValueError, match=r"has n_routed_experts: of NemotronHForCausalLM"):
        ModelSize.of(named | {"layers_block_type": ["mamba", "moe", "attention"]})


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, 0),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"sliding_window": 4096}, 48),
        ({"sliding_window": 4096, "model_type": "qwen3"}, 0),
        ({"sliding_window": 4096, "model_type": "qwen3", "use_sliding_window": True}, 48),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention", "full_attention"] * 24}, 24),
        ({"sliding_window": 4096, "sliding_window_pattern": 6}, 40),
        ({"sliding_window": 4096, "model_type": "gemma2"}, 24),
    ],
)
def test_layers_with_windows(fields: dict[str, Any], layers: int) -> None:
    size = ModelSize.of({**MISTRAL, **fields})
    assert size.window_layers == layers
    assert size.kv_share(1000) == 1.0
    assert size.kv_share(8192) == pytest.approx(1 - layers / 48 / 2)


def test_a_vision_language_class_is_as_large_as_its_text_model() -> None:
    """Its tower is left out. Whether the head is tied may stand beside the text model."""
    text = {name: value for name, value in QWEN3.items() if name != "tie_word_embeddings"}
    config = {"model_type": "qwen3_vl", "hidden_size": 1, "text_config": text}
    assert ModelSize.of(text_of(config)) == ModelSize.of(QWEN3) == ModelSize.of(text_of(QWEN3))
    assert ModelSize.of(text_of(config | {"tie_word_embeddings": True})).tied


def test_latent_attention() -> None:
    """Of DeepSeek-V2-Lite: parameters as published, without norms; latent vectors are whole."""
    config = MODEL_SHAPES["deepseek-v2-lite"]
    size = ModelSize.of(config)
    norms = 27 * (2 * 2048 + 512) + 2048
    assert size.resident_weights(1) == 15_706_484_224 - norms
    assert size.experts is not None
    assert (size.experts.layers, size.experts.shared, size.dense_layers) == (26, 2 * 1408, 1)
    assert size.kv_elements(1) == size.kv_elements(4) == 512 + 64
    assert size.divides(16) and not size.divides(32)
    replicated = 27 * 2048 * (512 + 64) + 26 * 2048 * 64
    assert size.layer_weights(2) - replicated == (size.layer_weights(1) - replicated) / 2
    # A decode step attends to 576 + 512 elements for each head, a prompt to 192 + 128.
    assert size.attention_operations(2, decode=True) == 2 * 8 * (576 + 512)
    assert size.attention_operations(2, decode=False) == 2 * 8 * (192 + 128)
    compressed = ModelSize.of({**config, "q_lora_rank": 1536, "moe_layer_freq": 2})
    more = 27 * (1536 * (2048 + 16 * 192) - 2048 * 16 * 192)
    assert compressed.experts is not None and compressed.experts.layers == 13
    assert compressed.latent is not None and size.latent is not None
    assert 27 * (compressed.latent.weights(2048, 16) - size.latent.weights(2048, 16)) == more


def test_what_ranks_can_share() -> None:
    assert ModelSize.of({**QWEN3, "intermediate_size": 6}).divides(8), "no layer has an MLP"
    assert not ModelSize.of({**QWEN3, "intermediate_size": 6, "mlp_only_layers": [0]}).divides(8)
    shared = ModelSize.of({**QWEN3, "shared_expert_intermediate_size": 12})
    assert shared.divides(4) and not shared.divides(8)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_what_is_quantized_takes_its_bytes_and_nothing_else_does(name: str) -> None:
    """Embeddings, LM head, routers, activations and states stay as they are."""
    plain, weights, kv = (
        ModelSize.of(MODEL_SHAPES[name], quantized=quantized)
        for quantized in (PLAIN, Quantized(weight_bytes=1), Quantized(kv_bytes=1))
    )
    routers = 0
    if (experts := plain.experts) is not None:
        routers = experts.layers * plain.hidden * (experts.count + experts.shared_gate)
    for tp in (1, 2, 8):
        kept = plain.head_weights(tp) * (1 if plain.tied else 2) + routers
        assert weights.resident_bytes(tp) == plain.resident_weights(tp) + kept
        assert kv.weight_bytes(tp) == plain.weight_bytes(tp) == 2 * plain.resident_weights(tp)
        assert 2 * kv.kv_bytes_per_token(tp) == plain.kv_bytes_per_token(tp)
        assert weights.kv_bytes_per_token(tp) == plain.kv_bytes_per_token(tp)
        for each in (weights, kv):
            assert each.state_bytes(tp) == plain.state_bytes(tp)
            assert each.step_bytes(tp, 8192, 256) == plain.step_bytes(tp, 8192, 256)
            assert each.expert_workspace_bytes(tp, False, 99) == plain.expert_workspace_bytes(
                tp, False, 99
            )
            workspaces = (size.latent_workspace_bytes(32768, 256, 16) for size in (each, plain))
            assert len({*workspaces}) == 1
    # A block is as large as a state, so it has more tokens.
    assert kv.block_size(1, 16) >= plain.block_size(1, 16)


def test_latent_attention_keeps_copies_of_quantized_weights_in_the_models_type() -> None:
    """`W_UK` and `W_UV` of DeepSeek-V2-Lite: 27 layers, 16 heads, a rank of 512, 128 and 128."""
    plain, quantized = (
        ModelSize.of(MODEL_SHAPES["deepseek-v2-lite"], quantized=each)
        for each in (Quantized(kv_bytes=1), Quantized(weight_bytes=1))
    )
    assert plain.absorbed_bytes(1) == 0
    assert [quantized.absorbed_bytes(tp) for tp in (1, 4)] == [
        27 * 16 * 512 * (128 + 128) * 2 // tp for tp in (1, 4)
    ]

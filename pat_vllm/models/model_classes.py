"""Classes of models whose sizes are known: one table for engines, `doctor` and `advise`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

EXPERT_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Fields, one of which has the number of a layer's experts."""

_HEADS = ("num_key_value_heads", "head_dim")
_KV_HEADS = ("num_key_value_heads",)
_WINDOWS = ("sliding_window", "layer_types")
_EXPERTS = ("num_experts_per_tok", "moe_intermediate_size")
_BESIDE_EXPERTS = ("n_shared_experts", "first_k_dense_replace")
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DELTA_NET = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
_MAMBA2 = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")


@dataclass(frozen=True)
class ModelClass:
    """Classes of vLLM's whose text models are built alike.

    Attributes:
        names: of the classes.
        model_types: of the text models in their `config.json`s; the first is one that transformers
            has.
        stated: fields beside those of every model that sizes depend on. What a file leaves out of
            them, transformers knows.
        mixture: whether some layers have experts.
        linear: which linear attention some layers have.
        gate: whether MLPs have a gate.
        windows: whether `sliding_window` is that of some layers; of others only where
            `use_sliding_window` is true.
    """

    names: tuple[str, ...]
    model_types: tuple[str, ...]
    stated: tuple[str, ...] = _HEADS
    mixture: bool = False
    linear: Literal["", "delta_net", "mamba2"] = ""
    gate: bool = True
    windows: bool = False

    def left_out(self, config: Mapping[str, Any]) -> list[str]:
        """What a `config.json` does not say of sizes."""
        needed = ("hidden_size", "num_attention_heads", "vocab_size", "tie_word_embeddings")
        layers = () if self.linear == "mamba2" else ("num_hidden_layers",)
        experts = self.mixture and not any(name in config for name in EXPERT_COUNTS)
        windows = ("layer_types",) if config.get("use_sliding_window") is True else ()
        names = (*needed, *layers, *self.stated, *EXPERT_COUNTS[:experts], *windows)
        return [name for name in names if name not in config]


MODEL_CLASSES = (
    ModelClass(("LlamaForCausalLM",), ("llama",), _KV_HEADS),
    ModelClass(("MistralForCausalLM",), ("mistral",), (*_KV_HEADS, "sliding_window"), windows=True),
    ModelClass(("Qwen2ForCausalLM", "MiMoForCausalLM"), ("qwen2", "mimo"), _KV_HEADS),
    ModelClass(("Qwen2_5_VLForConditionalGeneration",), ("qwen2_5_vl_text",), _KV_HEADS),
    ModelClass(("Qwen3ForCausalLM",), ("qwen3",)),
    ModelClass(("Qwen3VLForConditionalGeneration",), ("qwen3_vl_text",)),
    ModelClass(("Phi3ForCausalLM",), ("phi3",), _KV_HEADS, windows=True),
    ModelClass(("GemmaForCausalLM",), ("gemma",)),
    ModelClass(("Gemma2ForCausalLM",), ("gemma2",), (*_HEADS, *_WINDOWS), windows=True),
    ModelClass(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3_text",),
        (*_HEADS, *_WINDOWS),
        windows=True,
    ),
    ModelClass(("SmolLM3ForCausalLM",), ("smollm3",), _KV_HEADS),
    ModelClass(("SeedOssForCausalLM",), ("seed_oss",)),
    ModelClass(("Olmo2ForCausalLM",), ("olmo2",), _KV_HEADS),
    ModelClass(("Olmo3ForCausalLM",), ("olmo3",), (*_KV_HEADS, *_WINDOWS), windows=True),
    ModelClass(("GraniteForCausalLM",), ("granite",), _KV_HEADS),
    ModelClass(("GPTNeoXForCausalLM",), ("gpt_neox",), (), gate=False),
    ModelClass(("Starcoder2ForCausalLM",), ("starcoder2",), _KV_HEADS, gate=False, windows=True),
    ModelClass(("NemotronForCausalLM",), ("nemotron",), gate=False),
    ModelClass(("PhiForCausalLM",), ("phi",), _KV_HEADS, gate=False),
    # Mixtures of experts.
    ModelClass(
        ("DeepseekV2ForCausalLM",),
        ("deepseek_v2",),
        (*_LATENT, *_EXPERTS, *_BESIDE_EXPERTS),
        mixture=True,
    ),
    ModelClass(
        ("DeepseekV3ForCausalLM",),
        ("deepseek_v3", "kimi_k2"),
        (*_LATENT, *_EXPERTS, *_BESIDE_EXPERTS),
        mixture=True,
    ),
    ModelClass(
        ("Glm4MoeForCausalLM",),
        ("glm4_moe",),
        (*_KV_HEADS, *_EXPERTS, *_BESIDE_EXPERTS),
        mixture=True,
    ),
    ModelClass(
        ("GptOssForCausalLM",),
        ("gpt_oss",),
        (*_HEADS, *_WINDOWS, "num_experts_per_tok"),
        mixture=True,
        windows=True,
    ),
    ModelClass(
        ("MixtralForCausalLM",),
        ("mixtral",),
        (*_KV_HEADS, "num_experts_per_tok"),
        mixture=True,
        windows=True,
    ),
    ModelClass(
        ("OlmoeForCausalLM",), ("olmoe",), (*_KV_HEADS, "num_experts_per_tok"), mixture=True
    ),
    ModelClass(
        ("Qwen2MoeForCausalLM",),
        ("qwen2_moe",),
        (*_KV_HEADS, *_EXPERTS, "shared_expert_intermediate_size"),
        mixture=True,
    ),
    ModelClass(("Qwen3MoeForCausalLM",), ("qwen3_moe",), (*_KV_HEADS, *_EXPERTS), mixture=True),
    # Linear attention.
    ModelClass(
        ("Qwen3NextForCausalLM",),
        ("qwen3_next",),
        (*_HEADS, *_EXPERTS, *_DELTA_NET, "shared_expert_intermediate_size"),
        mixture=True,
        linear="delta_net",
    ),
    ModelClass(
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_text",),
        (*_HEADS, *_DELTA_NET),
        linear="delta_net",
    ),
    ModelClass(
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen3_5_moe_text",),
        (*_HEADS, *_EXPERTS, *_DELTA_NET, "shared_expert_intermediate_size"),
        mixture=True,
        linear="delta_net",
    ),
    ModelClass(
        ("NemotronHForCausalLM",),
        ("nemotron_h",),
        (*_HEADS, *_MAMBA2),
        linear="mamba2",
        gate=False,
    ),
)
"""Those whose sizes follow from their fields. Of another class nothing is computed."""

MIXTURES = tuple(kind for each in MODEL_CLASSES if each.mixture for kind in each.model_types)
"""Values of `model_type` of the mixtures of experts whose layers are known."""

_BY_NAME = {name: each for each in MODEL_CLASSES for name in each.names}
_BY_TYPE = {kind: each for each in MODEL_CLASSES for kind in each.model_types}


def class_of(config: Mapping[str, Any]) -> ModelClass | None:
    """The class of a text model, by the fields of its `config.json`; None: it is not known.

    vLLM takes the class that `architectures` names, whatever `model_type` says. Text models of
    classes for images may have a `model_type` alone.
    """
    if name := class_name(config):
        return _BY_NAME.get(name)
    kind = config.get("model_type")
    return _BY_TYPE.get(kind) if isinstance(kind, str) else None


def class_name(config: Mapping[str, Any]) -> str:
    """The first of the `architectures` of a `config.json`; "": it names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def known_class(config: Mapping[str, Any]) -> ModelClass:
    """The class of a text model.

    Raises:
        ValueError: it is not known.
    """
    if (found := class_of(config)) is not None:
        return found
    name = class_name(config) or f"model_type {str(config.get('model_type'))!r}"
    raise ValueError(f"the sizes of {name[:80]} are not known; known are {', '.join(_BY_NAME)}")

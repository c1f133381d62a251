"""What PAT refuses of models: `MODEL_RULES`, in one place for engines and for `advise`. Pure.

`refused.py` has what it refuses of vLLM's options beside that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pat_vllm.models.layer_sizes import experts_of, has_states, linear_heads, names_experts
from pat_vllm.models.model_classes import class_name
from pat_vllm.models.quantization import FP8_ONLINE, kv_scale_of, quantization_of

_DECODERS = "decoder-only models with full, sliding or latent attention"
_POOLING = ("Model", "Classification", "ForTextEncoding", "ForRewardModeling")
"""Ends of the names of vLLM's classes that do not generate."""
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
"""Ends of the names of those that do, although one of `_POOLING` may fit, too."""
Refused = list[tuple[str, Any, str]]
"""Options, or kinds of models, that are refused: (option, value, what is allowed)."""


@dataclass(frozen=True)
class ModelFacts:
    """What the rules look at: of an engine's config, or of a `config.json`.

    Attributes:
        name: as its user gives it.
        fields: the fields of its text model in `config.json`.
        runner: vLLM's, "generate" or another.
        quantization: vLLM's name for that of the weights; None: they are not quantized.
        kv_scale: what has a scale of its own in a KV cache in 8 bits (`kv_scale_of`).
        is_mixture: it has experts.
        has_states: some layers have states, as in Mamba or linear attention, in place of a KV cache
            or beside it.
    """

    name: str
    fields: Mapping[str, Any]
    runner: str = "generate"
    quantization: Any = None
    kv_scale: str = "tensor"
    is_encoder_decoder: bool = False
    is_mixture: bool = False
    has_states: bool = False

    @classmethod
    def of_file(
        cls, name: str, config: Mapping[str, Any], fields: Mapping[str, Any], pools: bool = False
    ) -> ModelFacts:
        """The facts of a checkpoint, found without vLLM.

        Args:
            config: contents of its `config.json`.
            fields: those of its text model, with defaults where they are known.
            pools: whether it is made for Sentence Transformers, so does not generate.
        """
        class_ = class_name(config)
        pools |= not class_.endswith(_GENERATING) and class_.endswith(_POOLING)
        encoders = (part.get("is_encoder_decoder") is True for part in (config, fields))
        return cls(
            name,
            fields,
            runner="pooling" if pools else "generate",
            quantization=quantization_of(config),
            kv_scale=kv_scale_of(config),
            is_encoder_decoder=any(encoders),
            is_mixture=names_experts(fields) is not None,
            has_states=has_states(fields),
        )


@dataclass(frozen=True)
class ModelRule:
    """A kind of model that PAT does not serve, or what it has to be in one of vLLM's options.

    Attributes:
        option: the option's name, as users know it.
        refused: the option's value if it is refused, else None.
        allowed: what is allowed.
        kind: the kind of models that it is about, in words; "": all models.
        mixtures: whether it is about mixtures of experts only.
    """

    option: str
    refused: Callable[[ModelFacts], Any]
    allowed: str
    kind: str = ""
    mixtures: bool = False


def _models(
    kind: str,
    is_refused: Callable[[ModelFacts], bool],
    allowed: str = _DECODERS,
    mixtures: bool = False,
) -> ModelRule:
    """Refuse a kind of model."""

    def refused(model: ModelFacts) -> Any:
        return f"{model.name} ({kind})" if is_refused(model) else None

    return ModelRule("model", refused, allowed, kind, mixtures)


RUNNER = ModelRule(
    "runner", lambda model: None if model.runner == "generate" else model.runner, "generate"
)
FP8 = (*FP8_ONLINE, "compressed-tensors", "modelopt")
"""vLLM's names of quantizations to fp8. What else the last two may be, workers refuse by layer."""
QUANTIZATION = ModelRule(
    "quantization",
    lambda model: None if model.quantization in FP8 else model.quantization,
    f"None, {', '.join(FP8)}, the last two as fp8 (not MXFP8, NVFP4 or MXFP4; of gpt-oss a "
    "bfloat16 checkpoint)",
)
KV_SCALE = ModelRule(
    "kv_cache_scheme.strategy",
    lambda model: None if model.kv_scale == "tensor" else model.kv_scale,
    "tensor",
)
KINDS_OF_MODELS = (
    _models(
        "a mixture of experts",
        lambda model: experts_of(model.fields) is None,
        "models whose config has one number of experts and one width for all layers",
        mixtures=True,
    ),
    _models("an encoder-decoder model", lambda model: model.is_encoder_decoder),
    _models(
        "a hybrid or Mamba model, but for Gated DeltaNet and Nemotron-H's Mamba2",
        lambda model: model.has_states and not linear_heads(model.fields),
        "Gated DeltaNet, of Qwen3-Next and Qwen3.5, and Mamba2, of Nemotron-H",
    ),
    _models(
        "a model with sparse attention",
        # Fields of DeepSeek V3.2 and V4, whose indexers have weights and a cache of their own.
        lambda model: any(name in model.fields for name in ("index_topk", "compress_ratios")),
    ),
)
MODEL_RULES = (RUNNER, QUANTIZATION, KV_SCALE, *KINDS_OF_MODELS)
"""All that is refused of a model, in the order in which an error names it."""


def refused_of(model: ModelFacts) -> Refused:
    """What an engine would refuse of a model."""
    return [
        (rule.option, value, rule.allowed)
        for rule in MODEL_RULES
        if (model.is_mixture or not rule.mixtures) and (value := rule.refused(model)) is not None
    ]


def refusal(refused: Iterable[tuple[str, Any, str]]) -> str:
    """The words of an error."""
    return 'distributed_executor_backend="pat" does not support ' + "; ".join(
        f"{option}={value!r} (allowed: {allowed})" for option, value, allowed in refused
    )

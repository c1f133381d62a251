"""What a model keeps in 8 bits: weights and KV, and the bytes of their elements. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FP8_KV = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Values of vLLM's `kv_cache_dtype` that keep KV in 8 bits, with one scale for each layer."""
FP8_ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
"""Values of vLLM's `quantization` that quantize the weights of a plain checkpoint."""
_KV_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, **dict.fromkeys(FP8_KV, 1)}
_MODELOPT = {"FP8": "modelopt", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt", "FP8_PB_WO": "modelopt"}
_MODELOPT |= {"NVFP4": "modelopt_fp4"}
"""vLLM's name of a quantization, by the `quant_algo` that ModelOpt writes into a checkpoint."""


def quantization_config(config: Mapping[str, Any]) -> Any:
    """What a `config.json` says of the quantization of weights and KV; None: nothing."""
    places = (config, text if isinstance(text := config.get("text_config"), dict) else {})
    names = ("quantization_config", "compression_config")
    return next((place[name] for place in places for name in names if place.get(name)), None)


def quantization_of(config: Mapping[str, Any]) -> Any:
    """How the weights of a checkpoint are quantized, as vLLM's `quantization` names it, by the
    contents of its `config.json`; None: they are not."""
    found = quantization_config(config)
    if not isinstance(found, dict):
        return found
    method = str(found.get("quant_method") or "").lower()
    if isinstance(own := found.get("quantization"), dict):  # ModelOpt's
        method = _MODELOPT.get(str(own.get("quant_algo")).upper(), method)
    if method == "mxfp4" and config.get("model_type") == "gpt_oss":
        method = "gpt_oss_mxfp4"
    return method.replace("compressed_tensors", "compressed-tensors") or None


def kv_scale_of(config: Mapping[str, Any]) -> str:
    """What has a scale of its own in the KV cache of a checkpoint: "tensor", all KV heads of a
    layer, or "attn_head", each."""
    scheme = _fields(quantization_config(config)).get("kv_cache_scheme")
    return str(_fields(scheme).get("strategy") or "tensor")


@dataclass(frozen=True)
class Quantized:
    """Bytes of an element where they are not those of the model's type.

    Attributes:
        weight_bytes: of the matrices of layers and of experts; None: of the model's type, as
            embeddings, LM head, routers and activations always are. Scales, 0.2% of the weights at
            most, are not counted.
        kv_bytes: of the KV cache; None: of the model's type.
    """

    weight_bytes: int | None = None
    kv_bytes: int | None = None

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        quantization: Any = None,
        kv_cache_dtype: str = "auto",
    ) -> Quantized:
        """What an engine keeps in 8 bits.

        Args:
            config: contents of the checkpoint's `config.json`.
            quantization: vLLM's option; None: the weights are as in the checkpoint.
            kv_cache_dtype: vLLM's option; "auto": as the checkpoint says.
        """
        own = _fields(quantization_config(config))
        name = quantization or quantization_of(config)
        of_fp8 = name in (*FP8_ONLINE, "modelopt") or (name == "compressed-tensors" and _fp8(own))
        kv = _KV_BYTES.get(kv_cache_dtype)
        if kv_cache_dtype == "auto" and _has_fp8_kv(own):
            kv = 1
        return cls(1 if of_fp8 else None, kv)


PLAIN = Quantized()
"""Nothing."""


def _fields(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _fp8(own: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors has weights in fp8, by its first group of layers."""
    groups = [*_fields(own.get("config_groups")).values()]
    return bool(groups) and _is_fp8(_fields(groups[0]).get("weights"))


def _is_fp8(scheme: Any) -> bool:
    return _fields(scheme).get("num_bits") == 8 and _fields(scheme).get("type") == "float"


def _has_fp8_kv(own: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has vLLM keep KV in 8 bits without being asked."""
    modelopt = _fields(own.get("quantization"))
    if str(modelopt.get("kv_cache_quant_algo") or own.get("kv_cache_quant_algo")).upper() == "FP8":
        return True
    return _is_fp8(own.get("kv_cache_scheme") or modelopt.get("kv_cache_scheme"))

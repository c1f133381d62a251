"""What a model keeps in 8 bits, by its config.json and vLLM's options."""

from __future__ import annotations

from typing import Any

import pytest

from pat_vllm.models.quantization import Quantized, kv_scale_of

FP8 = {"num_bits": 8, "type": "float"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": FP8 | {"strategy": "channel"}}},
}
INT8 = {"weights": {"num_bits": 8, "type": "int"}}
MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("own", "options", "expected"),
    [
        (None, {}, (None, None)),
        # What vLLM's options ask for.
        (None, {"quantization": "fp8"}, (1, None)),
        (None, {"quantization": "fp8_per_block", "kv_cache_dtype": "fp8_e5m2"}, (1, 1)),
        (None, {"kv_cache_dtype": "fp8"}, (None, 1)),
        (None, {"kv_cache_dtype": "bfloat16"}, (None, 2)),
        (None, {"kv_cache_dtype": "float32"}, (None, 4)),
        # What a checkpoint has.
        (BLOCKS, {}, (1, None)),
        (COMPRESSED, {}, (1, None)),
        (COMPRESSED | {"kv_cache_scheme": FP8}, {}, (1, 1)),
        (COMPRESSED | {"kv_cache_scheme": FP8}, {"kv_cache_dtype": "bfloat16"}, (1, 2)),
        (COMPRESSED | {"config_groups": {"group_0": INT8}}, {}, (None, None)),
        (MODELOPT, {}, (1, 1)),
        ({"quant_method": "awq"}, {}, (None, None)),
        ("int4", {}, (None, None)),
    ],
)
def test_bytes_of_elements(own: Any, options: dict[str, str], expected: tuple[Any, Any]) -> None:
    config = {} if own is None else {"quantization_config": own}
    quantized = Quantized.of(config, **options)
    assert (quantized.weight_bytes, quantized.kv_bytes) == expected
    assert Quantized.of({"text_config": config}, **options) == quantized


def test_scales_of_heads_are_told_from_those_of_layers() -> None:
    scheme = COMPRESSED | {"kv_cache_scheme": FP8 | {"strategy": "attn_head"}}
    assert kv_scale_of({"quantization_config": scheme}) == "attn_head"
    for other in ({}, {"quantization_config": COMPRESSED}, {"quantization_config": "int4"}):
        assert kv_scale_of(other) == "tensor"

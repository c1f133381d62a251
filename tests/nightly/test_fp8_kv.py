"""KV in 8 bits on more engines: ranks, runners, heads that layouts copy, experts, states; with
weights in 8 bits, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.test_switch import (  # noqa: F401
    case,
    test_every_ordered_pair_of_layouts,
    test_null_blocks_are_clear_after_a_switch,
    test_recomputing_gives_the_same,
)
from tests.nightly.test_switch import switching
from tests.support.pool import EngineSpec


def in_8_bits(spec: EngineSpec, dtype: str = "fp8") -> EngineSpec:
    options = {**spec.options, "kv_cache_dtype": dtype}
    return replace(spec, name=f"{spec.name}-{dtype}", options=options)


pytestmark = pytest.mark.engine(
    in_8_bits(switching("qwen3", 4)),
    in_8_bits(switching("qwen3", 2, runner=2), "fp8_e5m2"),
    in_8_bits(switching("llama_few_kv", 4, base_tp=2)),
    in_8_bits(switching("gpt_oss", 2)),
    # With weights in fp8, whose layers of attention have scales that a checkpoint may bring.
    in_8_bits(switching("fp8_blocks", 2)),
    # Attention's blocks have more tokens then, and states have the model's type.
    in_8_bits(switching("nemotron_h", 2, cached=False)),
)

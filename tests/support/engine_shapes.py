"""What an engine on some GPU would take its memory and layouts from, without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pat_vllm.config import PATConfig
from pat_vllm.modelled.gpus import Device
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.choice import Choice, choose
from pat_vllm.start.load import expected_load


def engine_shape(
    config: Mapping[str, Any], pat: PATConfig, ranks: int, given: Mapping[str, Any], device: Device
) -> tuple[EngineShape, Choice]:
    """An engine's options that memory depends on, and its layouts, as it would choose them.

    Args:
        config: of the model, in 16 bits.
        given: options of vLLM's.
    """
    weights = pat.weights if pat.weights != "auto" else "inplace"
    shape = EngineShape((), pat, **given, weights=weights, migrates=pat.kv_transfer != "recompute")
    load = expected_load(pat, shape, ranks)
    choice = choose(config, pat, shape, ranks, device, dtype_bytes=2, load=load)
    chosen = replace(shape, layouts=choice.layouts, experts=choice.experts, link=choice.link)
    return chosen, choice

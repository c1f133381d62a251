"""What a model takes of each GPU, computed from its config before anything is started. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from pat_vllm.advice.lengths import expected_load
from pat_vllm.config import PATConfig
from pat_vllm.doctor.report import Check
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.moe_config import MoEConfig
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.choice import Choice, choose
from pat_vllm.start.gpus import Device, gib
from pat_vllm.start.memory_estimate import estimate

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def engine_shape(
    config: Mapping[str, Any],
    pat: PATConfig,
    ranks: int,
    given: Mapping[str, Any],
    device: Device | None,
    dtype: str = "bfloat16",
) -> tuple[EngineShape, Choice]:
    """An engine's options that memory depends on, and its layouts, as it would choose them.

    Args:
        config: of the model.
        given: options of vLLM's; those that memory does not depend on are left out.
        device: that it would run on.
    """
    known = {field.name for field in fields(EngineShape)} - {"layouts", "pat"}
    options = {name: value for name, value in given.items() if name in known}
    options.setdefault("max_model_len", config["max_position_embeddings"])
    weights = pat.weights if pat.weights != "auto" else "inplace"
    migrates = pat.kv_transfer != "recompute"
    shape = EngineShape((), pat, **{**options, "weights": weights, "migrates": migrates})
    load = expected_load(pat, shape, ranks)
    size = _DTYPE_BYTES[dtype]
    choice = choose(config, pat, shape, ranks, device, dtype_bytes=size, load=load)
    chosen = replace(shape, layouts=choice.layouts, experts=choice.experts, link=choice.link)
    return chosen, choice


def check_memory(
    config: Mapping[str, Any],
    device: Device,
    shape: EngineShape,
    dtype: str = "bfloat16",
    chosen: str = "",
) -> Check:
    """Whether the weights, and a KV cache that is of use, find room on each GPU.

    Args:
        chosen: how the layouts were, in a line.
    """
    name = "memory, computed"
    try:
        model = ModelSize.of(config, _DTYPE_BYTES[dtype])
    except ValueError as error:
        return Check(name, f"not computed: {error}")
    memory = estimate(model, shape, device)
    tokens = memory.kv_tokens[shape.layouts[0].tp]
    breakdown = (
        f"a rank: weights {gib(memory.weights)} of {gib(memory.requested)} that vLLM may use, "
        f"buffers, communicators and tables "
        f"{gib(memory.buffers + memory.communicators + memory.swap_tables)}, activations "
        f"{gib(memory.activations)}, CUDA graphs {gib(memory.graphs)}, KV cache "
        f"{gib(memory.kv)} = {tokens:,} tokens a replica of {shape.layouts[0]}; "
        f"{gib(memory.pinned)} of pinned host memory"
    )
    if chosen:
        breakdown = f"{chosen}; {breakdown}"
    values = {**asdict(memory), "kv_tokens_per_replica": tokens, "computed": True}
    problem = None
    if tokens < shape.max_model_len:
        problem = (
            f"too little memory: at base layout {shape.layouts[0]} weights take "
            f"{gib(memory.weights)} of the {gib(memory.requested)} that vLLM may use of a GPU, "
            f"and {tokens:,} tokens of KV have room; a request may have "
            f"{shape.max_model_len:,}. {_way_out(config, model, device, shape)}"
        )
    return Check(name, breakdown, problem, values=values)


def _way_out(
    config: Mapping[str, Any], model: ModelSize, device: Device, shape: EngineShape
) -> str:
    """The smallest base_tp that would do."""
    base, mixture = shape.layouts[0], MoEConfig.from_config(config)
    for base_tp in range(base.tp + 1, base.world_size + 1):
        pat = PATConfig(base_tp=base_tp)
        try:
            layouts = pat.resolve_layouts(base.world_size)
            experts = pat.resolve_experts(mixture, layouts)
        except ValueError:
            continue
        if model.heads % base_tp:
            continue
        other = replace(shape, pat=pat, layouts=layouts, experts=experts)
        memory = estimate(model, other, device)
        if (tokens := memory.kv_tokens[base_tp]) >= shape.max_model_len:
            return f"base_tp={base_tp} has room for {tokens:,} tokens"
    return "No base_tp has enough; a smaller max_model_len, or more GPUs"

"""What an engine takes of each GPU, computed from a model's config and the engine's options. Pure.

Not computed: CUDA graphs, which vLLM measures by capturing them, NCCL's and FlashInfer's
all-reduce memory. They are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from pat_vllm.layout import Layout
from pat_vllm.memory.buffers import EngineShape, MiB, all_buffers, pinned_bytes
from pat_vllm.memory.model import ModelShape
from pat_vllm.memory.sizing import Measured, kv_cache_bytes, staged_share

SYMMETRIC_MEMORY = {2: 64 * MiB, 4: 32 * MiB, 6: 64 * MiB, 8: 64 * MiB}
CUSTOM_ALL_REDUCE = {2: 8 * MiB, 4: 8 * MiB, 6: MiB // 2, 8: MiB // 4}
MULTICAST_ALL_GATHER = {2: 8 * MiB, 4: 4 * MiB, 6: 2 * MiB, 8: 2 * MiB}
REDUCE_SCATTER = 16 * MiB
"""Buffers of vLLM's communicators on compute capability 9.0, by ranks of a group."""
_REGISTERED = 8 * MiB
_MULTICAST_COPIES = 6


@dataclass(frozen=True)
class GPU:
    """A device.

    Attributes:
        memory: bytes, as the driver tells them.
        multicast: the GPUs have NVLink with multicast, and compute capability 9.0.
    """

    memory: int
    multicast: bool = True


H100 = GPU(81559 * MiB)
"""With 80 GB."""


@dataclass(frozen=True)
class RankMemory:
    """What one rank takes. Bytes.

    Attributes:
        requested: what vLLM may use, `gpu_memory_utilization` of the device.
        weights: with the table of rotary embeddings.
        swap_tables: which rows trade places between layouts.
        communicators: of groups that do not span all ranks, one for each tp; vLLM makes those that
            do before it looks at what is free. Of a mixture that is one more, which has no memory
            but NCCL's.
        buffers: of all model runners.
        activations: of the largest step.
        staged: most that a switch stages. It may lie in the memory of activations.
        graphs: as given.
        kv: the KV cache.
        pinned: host memory.
    """

    requested: int
    weights: int
    swap_tables: int
    communicators: int
    buffers: int
    activations: int
    staged: int
    graphs: int
    kv: int
    pinned: int


def communicator_bytes(tp: int) -> int:
    """Device memory of a TP group's communicator, without NCCL's and FlashInfer's.

    Symmetric memory; the custom all-reduce with its buffers for gathering and scattering.
    """
    if tp not in SYMMETRIC_MEMORY:
        return 0
    stage = max(MULTICAST_ALL_GATHER[tp] * tp, REDUCE_SCATTER)
    custom = CUSTOM_ALL_REDUCE[tp] + REDUCE_SCATTER + _REGISTERED
    return SYMMETRIC_MEMORY[tp] + custom + _MULTICAST_COPIES * stage


def rank_memory(
    model: ModelShape, engine: EngineShape, gpu: GPU, graphs: int = 0, groups: int = 0
) -> RankMemory:
    """What a rank of the engine takes.

    Args:
        graphs: bytes of the CUDA graphs of all layouts.
        groups: bytes of NCCL and of FlashInfer's all-reduce, of the groups that do not span all
            ranks.
    """
    layouts = engine.layouts
    in_place = engine.weights == "inplace"
    copies = layouts[:1] if in_place else layouts
    weights = sum(model.weight_bytes(one.tp, one.experts == "ep") for one in copies)
    weights += model.rotary_bytes
    tables = model.swap_table_bytes(layouts) if in_place else 0
    if gpu.multicast:
        # Layouts of both kinds of experts share the group of a tp.
        groups += sum(
            communicator_bytes(tp) for tp in {one.tp for one in layouts if one.replicas > 1}
        )
    buffers = all_buffers(model, engine)
    early = sum(one.device for of_layout in buffers for one in of_layout if not one.with_kv)
    late = [sum(one.device for one in of_layout if one.with_kv) for of_layout in buffers]
    requested = int(gpu.memory * engine.gpu_memory_utilization)
    free = requested - weights - tables - groups - early
    steps = [_step_bytes(model, engine, one) for one in layouts]
    measured = [Measured(free - step, step) for step in steps]
    share = staged_share(layouts, model.kv_heads, model.layers) if engine.migrates else 0.0
    kv = kv_cache_bytes(measured, graphs, late, share)
    return RankMemory(
        requested=requested,
        weights=weights,
        swap_tables=tables,
        communicators=groups,
        buffers=early + sum(late),
        activations=max(steps),
        staged=int(kv * share),
        graphs=graphs,
        kv=kv,
        pinned=pinned_bytes(buffers),
    )


def _step_bytes(model: ModelShape, engine: EngineShape, layout: Layout) -> int:
    limits = engine.limits(layout)
    return model.step_bytes(layout.tp, limits.max_num_batched_tokens, limits.max_num_seqs)

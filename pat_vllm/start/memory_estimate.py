"""What an engine takes of each device, and what is left for KV. Pure.

`estimate` computes it before a start, for PAT's engines and for static ones: `start/choice.py`,
`advise` and `doctor` ask. Later, a worker on a GPU measures it (`worker/gpu_worker.py`), and sizes
its KV cache by the same `kv_cache_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pat_vllm.kv_transfer.plan import EXCHANGE_CHANNELS, ROUNDS
from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import Device, MiB
from pat_vllm.models.drafter_size import with_kv_of
from pat_vllm.models.model_size import ModelSize
from pat_vllm.start.buffers import EngineShape, all_buffers
from pat_vllm.start.limits import Limits

SYMMETRIC_MEMORY = {2: 64 * MiB, 4: 32 * MiB, 6: 64 * MiB, 8: 64 * MiB}
CUSTOM_ALL_REDUCE = {2: 8 * MiB, 4: 8 * MiB, 6: MiB // 2, 8: MiB // 4}
MULTICAST_ALL_GATHER = {2: 8 * MiB, 4: 4 * MiB, 6: 2 * MiB, 8: 2 * MiB}
REDUCE_SCATTER = 16 * MiB
"""Bytes of buffers of vLLM's communicators on compute capability 9.0, by ranks of a group: the
limits in its `all_reduce_utils.py` and `custom_all_reduce.py` (`tests/gpuless/test_sizes.py`)."""
_REGISTERED = 8 * MiB
"""Bytes of addresses of registered buffers in the custom all-reduce (vLLM's `rank_data`)."""
_MULTICAST_COPIES = 6
"""Stages of its multicast buffer: three to gather and three to scatter (`_init_mnnvl_buffer`)."""
_NCCL = 256 * MiB
"""Bytes of a group's NCCL communicator; an assumption."""
FLASHINFER_ALL_REDUCE = {
    "9.0": {2: 64 * MiB, 4: 2 * MiB, 8: MiB // 2},
    "10.0": {2: 64 * MiB, 4: 32 * MiB, 8: MiB},
    "10.3": {2: 64 * MiB, 4: 64 * MiB, 8: 4 * MiB},
}
"""The most bytes of input that vLLM fuses an all-reduce with norms for, by capability and ranks."""
_FLASHINFER_COPIES = 6
"""Buffers of that size in FlashInfer: three each of a two-shot all-reduce's input and output, by a
reading of FlashInfer 0.7, not measured."""
_CHANNEL = 9 * MiB // 2
"""Bytes of one NCCL channel to one other rank; an assumption."""

GRAPH_BYTES = 172 << 10
"""Bytes of a CUDA graph for each layer and captured size; an assumption. It gives the 0.52 GiB that
a published log of vLLM with Qwen3-8B says, for 51 piecewise and 35 whole graphs (LMCache issue
3430)."""
_LARGEST_GRAPH = 512
"""Tokens of the largest batch for which vLLM captures a graph by default."""


class Measured(NamedTuple):
    """What vLLM measured of one layout on a device, in bytes.

    Attributes:
        available: what it would give to the KV cache, were this the only layout and without CUDA
            graphs.
        activations: what it has set aside for the largest step.
    """

    available: int
    activations: int


def kv_cache_bytes(
    layouts: Sequence[Measured],
    graphs: int,
    buffers: Sequence[int],
    staged: float,
    gathered: int = 0,
) -> int:
    """What is left for the KV cache beside all that an engine of these layouts needs.

    One layout runs at a time, so activations count once. A switch has no step beside it and may use
    the memory of activations; what these lack for it is kept free.

    Args:
        layouts: in the order of their measurement on this device. What a layout keeps there is
            missing from what the later ones have available.
        graphs: bytes of the CUDA graphs of all layouts, in the pool that they share.
        buffers: bytes that each layout allocates with its KV cache, after it was measured. vLLM
            does not count its own; they lie in what `gpu_memory_utilization` leaves. So do those of
            one layout here.
        staged: share of the KV cache that a switch stages in the worst case.
        gathered: bytes in which it brings columns of weights together, beside that.
    """
    last = layouts[-1]
    left = last.available + last.activations - graphs - (sum(buffers) - max(buffers))
    activations = max(layout.activations for layout in layouts)
    available = left - activations
    # Where a switch stages more than activations take, cache and stage share all that is left.
    if available * staged + gathered <= activations:
        return available
    return int((left - gathered) / (1 + staged))


def num_regions(layers: Iterable[int]) -> int:
    """Number of regions of the KV cache, in each of which a layer of every group lies.

    Layers are divided into groups as by vLLM's `_get_kv_cache_groups_uniform_page_size`, whose
    heuristic the 1.5 is.

    Args:
        layers: number of layers of each kind.
    """
    counts = [count for count in layers if count]
    few, many = min(counts), max(counts)
    return many if many < 1.5 * few else few


def staged_share(layouts: Sequence[Layout], num_kv_heads: int, num_regions: int) -> float:
    """Share of the KV cache that a switch between any two layouts stages in the worst case.

    A switch stages one region at a time: in whole what it sends, once for each rank that gets the
    same KV heads, and one round's part of what it sends and receives.
    """
    if len(layouts) == 1:
        return 0.0
    sent = max(1, max(layout.tp for layout in layouts) // num_kv_heads)
    return (sent + 2 / ROUNDS) / num_regions


@dataclass(frozen=True)
class RankMemory:
    """What one rank takes. Bytes.

    Attributes:
        requested: what vLLM may use, `gpu_memory_utilization` of the device.
        weights: weights, also a drafter's and a tower's, what each layout makes of them for latent
            attention, and the table of rotary embeddings.
        swap_tables: tables of the rows that trade places between layouts.
        communicators: those of groups that do not span all ranks, one for each tp (vLLM makes a
            group of all ranks before it looks at what is free); FlashInfer's buffers of every
            group; and, with several layouts, the communicator by which KV moves.
        buffers: what all model runners keep.
        activations: what the largest step takes.
        graphs: CUDA graphs of all layouts.
        kv: the KV cache; below 0 where the rest has no room.
        kv_tokens: tokens whose KV a replica holds, if contexts are the longest, by tp; 0 where
            there is no room.
        pinned: pinned host memory.
    """

    requested: int
    weights: int
    swap_tables: int
    communicators: int
    buffers: int
    activations: int
    graphs: int
    kv: int
    kv_tokens: dict[int, int]
    pinned: int


def estimate(model: ModelSize, engine: EngineShape, device: Device) -> RankMemory:
    """What a rank of an engine takes: of PAT's, or of a static one (`static_engine`).

    With weights in place, a rank holds the base layout's shard in every layout; with copies, each
    layout's.
    """
    layouts = engine.layouts
    in_place, spread = engine.weights == "inplace", engine.experts == "ep"
    held = layouts[:1] if in_place else layouts
    weights = sum(model.weight_bytes(layout.tp, spread) for layout in held)
    if engine.drafter is not None:
        weights += sum(engine.drafter.weight_bytes(layout.tp, spread) for layout in held)
    if engine.tower is not None:
        weights += len(held) * engine.tower.weights * model.dtype_bytes
    weights += sum(model.absorbed_bytes(layout.tp) for layout in layouts)
    weights += model.rotary_bytes
    tables = model.swap_table_bytes(layouts, spread) if in_place else 0
    narrow = [layout for layout in layouts if layout.tp > 1 and layout.replicas > 1]
    groups = sum(communicator_bytes(layout.tp, device) for layout in narrow)
    # Unlike those, vLLM makes FlashInfer's buffers with the first graph.
    groups += sum(flashinfer_bytes(layout.tp, device) for layout in layouts)
    if len(layouts) > 1 and engine.attention != "CPU_ATTN":
        groups += exchange_bytes(layouts[0].world_size)
    limits = [engine.limits(layout) for layout in layouts]
    graphs = sum(_graph_bytes(model, engine, limit) for limit in limits)
    buffers = all_buffers(model, engine)
    early = sum(
        buffer.device for of_layout in buffers for buffer in of_layout if not buffer.with_kv
    )
    late = [sum(buffer.device for buffer in of_layout if buffer.with_kv) for of_layout in buffers]
    steps = [_step_bytes(model, engine, layout) for layout in layouts]
    of_kv = with_kv_of(model, engine.drafter)
    block_size = of_kv.block_size(layouts[0].tp, engine.block_size)
    share = _kv_share(of_kv, engine.max_model_len, block_size, engine.num_speculative_tokens)
    requested = int(device.memory * engine.gpu_memory_utilization)
    free = requested - weights - tables - groups - early
    staged = (
        staged_share(layouts, model.kv_heads, num_regions(_layers_by_kind(of_kv)))
        if engine.migrates
        else 0.0
    )
    gathered = model.gathered_bytes(layouts) if in_place else 0
    kv = engine.kv_cache_memory_bytes or kv_cache_bytes(
        [Measured(free - step, step) for step in steps], graphs, late, staged, gathered
    )
    return RankMemory(
        requested=requested,
        weights=weights,
        swap_tables=tables,
        communicators=groups,
        buffers=early + sum(late),
        activations=max(steps),
        graphs=graphs,
        kv=kv,
        kv_tokens={
            layout.tp: max(0, int(kv // (block_size * share * of_kv.kv_bytes_per_token(layout.tp))))
            * block_size
            for layout in layouts
        },
        pinned=sum(buffer.pinned for of_layout in buffers for buffer in of_layout),
    )


def _step_bytes(model: ModelSize, engine: EngineShape, layout: Layout) -> int:
    """Activations of a layout's largest step: of the images of one, or of the text that follows
    while their embeddings are kept."""
    limit = engine.limits(layout)
    text = model.step_bytes(layout.tp, limit.max_num_batched_tokens, limit.max_num_seqs)
    if (tower := engine.tower) is None:
        return text
    images = engine.encoder_tokens(layout)
    kept = tower.embeddings(images) * model.dtype_bytes
    return max(tower.step(images) * model.dtype_bytes, text + kept)


def _layers_by_kind(model: ModelSize) -> tuple[int, int, int]:
    """Numbers of layers with full attention, with a window, and with linear attention."""
    whole = model.attention_layers - model.window_layers
    return whole, model.window_layers, model.linear.layers if model.linear else 0


def _kv_share(model: ModelSize, tokens: int, block_size: int, drafts: int) -> float:
    """Memory of a context of so many tokens, as a share of its KV if all layers had full attention.

    vLLM fills groups up to one size: layers that are missing in a group take memory as well. In
    layers with linear attention, a context has two blocks of each group, whatever its length: that
    of its state, and one while the state goes to the next. It has another for each of the drafts
    that a step may verify.
    """
    # Tokens whose blocks a context holds, by kind as in `_layers_by_kind`.
    slots = min(tokens, 2 * block_size) + drafts * block_size
    held = tokens, min(tokens, model.window + block_size), slots
    of_kinds = _layers_by_kind(model)
    size = num_regions(of_kinds)
    total = sum(
        -(-layers // size) * size * each for layers, each in zip(of_kinds, held, strict=True)
    )
    return total / (model.attention_layers * tokens)


def static_engine(engine: EngineShape, layout: Layout) -> EngineShape:
    """The static engine that equals one replica of a layout: its tp, and its limits in PAT."""
    return replace(engine, layouts=(Layout(layout.tp, 1),))


def communicator_bytes(tp: int, device: Device) -> int:
    """Bytes on a device of a TP group's communicator, without FlashInfer's.

    It has NCCL's buffers; on compute capability 9.0 also symmetric memory, and the custom
    all-reduce with its buffers for gathering and scattering.
    """
    if tp not in SYMMETRIC_MEMORY or device.capability != "9.0":
        return _NCCL
    stage = max(MULTICAST_ALL_GATHER[tp] * tp, REDUCE_SCATTER)
    custom = CUSTOM_ALL_REDUCE[tp] + REDUCE_SCATTER + _REGISTERED
    return _NCCL + SYMMETRIC_MEMORY[tp] + custom + _MULTICAST_COPIES * stage


def flashinfer_bytes(tp: int, device: Device) -> int:
    """Bytes on a device of FlashInfer's all-reduce in a TP group; 0 where vLLM does not take it."""
    return _FLASHINFER_COPIES * FLASHINFER_ALL_REDUCE.get(device.capability, {}).get(tp, 0)


def exchange_bytes(ranks: int) -> int:
    """Bytes on a device of the communicator by which KV moves, with channels to each other rank."""
    return (ranks - 1) * EXCHANGE_CHANNELS * _CHANNEL


def _graph_bytes(model: ModelSize, engine: EngineShape, limits: Limits) -> int:
    """Bytes of a layout's CUDA graphs. vLLM captures whole graphs up to the tokens of a decode step
    of all requests, and piecewise ones up to twice as many."""
    if engine.enforce_eager or engine.attention == "CPU_ATTN":
        return 0
    tokens = limits.max_num_seqs * (1 + engine.num_speculative_tokens)
    captured = _captures(2 * tokens) + _captures(tokens)
    return int(with_kv_of(model, engine.drafter).depth * captured * GRAPH_BYTES)


def _captures(most: int) -> int:
    """Number of batch sizes, of at most so many tokens, for which vLLM captures a graph."""
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST_GRAPH + 1, 16))
    return sum(size <= most for size in sizes)

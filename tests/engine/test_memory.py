"""An engine on CPU allocates what `start/memory_estimate.py` says: weights, KV, staging, buffers.

Counted are the storages of all tensors that a worker's model runners hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pat_vllm
from pat_vllm.kv_transfer.plan import ROUNDS
from pat_vllm.modelled.gpus import Device
from pat_vllm.models.drafter_size import DrafterSize, with_kv_of
from pat_vllm.models.images import takes_images
from pat_vllm.models.model_size import ModelSize
from pat_vllm.models.quantization import Quantized
from pat_vllm.models.tower_size import TowerSize
from pat_vllm.start.buffers import EngineShape, all_buffers
from pat_vllm.start.memory_estimate import estimate, staged_share
from pat_vllm.start.prepare import drafter_of
from pat_vllm.start.setup import Setup
from tests.engine.specs import COPIES, FOUR_RANKS, IN_PLACE, LATENT, UPDATES
from tests.support.pool import EngineSpec

# The shared engines with drafters are so small that much would be within the tolerance, and so are
# all with Model Runner V2.
LARGE: dict[str, Any] = UPDATES | {
    "max_num_seqs": 48,
    "max_num_batched_tokens": 1536,
    "max_model_len": 1024,
}
LARGE_V1, LARGE_V2 = (
    EngineSpec(
        f"large {runner}, MTP",
        "mimo",
        2,
        IN_PLACE,
        LARGE | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
        model_runner_v2=runner == "V2",
    )
    for runner in ("V1", "V2")
)

pytestmark = pytest.mark.engine(COPIES, FOUR_RANKS, LARGE_V1, LARGE_V2, LATENT)

EXACT = 0.003
TOLERANCE = 0.01
"""Of the bytes that are estimated. What is small is left out: norms and biases of weights, a few
bytes for each request. In these models they are a larger part than in those of users."""


# ---------------------------------------------------------------- in a worker


def allocated(worker: Any) -> dict[str, Any]:
    """Bytes of a rank; by layout, base first, those that no layout before has."""
    seen: set[int] = {worker._buffer.buffer.untyped_storage().data_ptr()}
    weights, runners, largest = [], [], []
    for runtime in worker._runtimes.values():
        models = [runtime.runner.get_model(), getattr(runtime.runner, "get_draft_model", list)()]
        tensors = [t for each in models if each for t in (*each.parameters(), *each.buffers())]
        weights.append(sum(_new(tensors, seen).values()))
    for runtime in worker._runtimes.values():
        named = dict(_tensors(runtime.runner))
        new = _new(named.values(), seen)
        runners.append(sum(new.values()))
        names = {tensor.untyped_storage().data_ptr(): name for name, tensor in named.items()}
        by_size = sorted(new, key=lambda at: -new[at])
        largest.append({names[at]: new[at] for at in by_size})
    return {
        "kv": worker._buffer.buffer.nbytes,
        "blocks": [runtime.kv_cache_config.num_blocks for runtime in worker._runtimes.values()],
        "weights": weights,
        "runners": runners,
        "largest": largest,
        "staged": _staged_by_a_full_switch(worker),
    }


def _new(tensors: Any, seen: set[int]) -> dict[int, int]:
    """Bytes of the storages that were not seen before."""
    new: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            new[storage.data_ptr()] = storage.nbytes()
    seen.update(new)
    return new


_HOLDERS = ("vllm.v1", "vllm.model_executor.layers.attention")
"""Modules of the classes whose objects a runner consists of."""


def _tensors(runner: Any) -> Iterator[tuple[str, Any]]:
    """All tensors that a model runner leads to, but for those of its model and its config."""
    import numpy as np
    import torch
    from torch import nn

    passed: set[int] = set()
    waiting: list[tuple[str, Any]] = [("runner", runner)]
    # Neither a parameter nor a buffer of the model's.
    waiting += [("deepstack", getattr(runner.get_model(), "deepstack_input_embeds", ()))]
    while waiting:
        name, item = waiting.pop()
        if id(item) in passed or isinstance(item, nn.Module | np.ndarray | str | bytes):
            continue
        passed.add(id(item))
        kind = type(item)
        if isinstance(item, torch.Tensor):
            yield name, item
        elif isinstance(item, Mapping):
            waiting += [(f"{name}[{key!r}]", value) for key, value in item.items()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += [(f"{name}[{i}]", value) for i, value in enumerate(item)]
        elif kind.__module__.startswith(_HOLDERS) and hasattr(item, "__dict__"):
            waiting += [(f"{name}.{key}", value) for key, value in vars(item).items()]


def _staged_by_a_full_switch(worker: Any) -> int:
    """Bytes that a switch of all KV that has room, from the base layout to the widest, stages.

    Collective.
    """
    from pat_vllm.kv_transfer.plan import RequestBlocks, plan_moves

    source, *_, target = worker._runtimes.values()
    blocks = source.kv_cache_config.num_blocks
    requests = [
        RequestBlocks(
            f"of replica {replica}",
            replica,
            tuple(range(blocks)),
            0,
            tuple(range(replica * blocks, (replica + 1) * blocks)),
        )
        for replica in range(target.kv_cache_config.num_blocks // blocks)
    ]
    plan = plan_moves(source.layout, target.layout, worker._kinds, requests)
    worker._move_kv(source, target, plan)
    size: int = worker._exchange._transport._own.size
    return size


# ---------------------------------------------------------------- in the process of the tests


def arithmetic_of(llm: Any) -> tuple[ModelSize, EngineShape]:
    """What the arithmetic is told of an engine."""
    config = llm.llm_engine.vllm_config
    setup = Setup.of(config)
    scheduler, speculative = config.scheduler_config, config.speculative_config
    whole = json.loads((Path(config.model_config.model) / "config.json").read_text())
    model = whole.get("text_config", whole)
    engine = EngineShape(
        tuple(pat_vllm.report(llm).layouts),
        pat=setup.options,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=config.model_config.max_model_len,
        block_size=config.cache_config.block_size,
        kv_cache_memory_bytes=config.cache_config.kv_cache_memory_bytes,
        runner="V2" if config.use_v2_model_runner else "V1",
        weights=setup.weights,
        attention="CPU_ATTN",
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        tower=TowerSize.of(whole) if takes_images(config.model_config) else None,
    )
    quantized = Quantized.of(model, kv_cache_dtype=config.cache_config.cache_dtype)
    size = ModelSize.of(model, dtype_bytes=4, quantized=quantized)
    if (drafter := drafter_of(speculative)) is not None:
        engine = replace(engine, drafter=DrafterSize.of(drafter[0], size, drafter[1]))
    return size, engine


def check_allocated(llm: Any) -> None:
    """Weights in all; of buffers, what no layout before has; of KV, that each layout has all of it.

    Ranks that share memory stage what is sent: a layer, when all of it moves.
    """
    model, engine = arithmetic_of(llm)
    memory, of_kv = estimate(model, engine, Device(0)), with_kv_of(model, engine.drafter)
    buffers = [sum(buffer.on_cpu for buffer in own) for own in all_buffers(model, engine)]
    share = staged_share(engine.layouts, model.kv_heads, of_kv.layers)
    ranks = llm.collective_rpc(allocated)
    # Of a state that is whole on every rank, one replica's has room in the widest layout.
    staged = max(rank["staged"] for rank in ranks)
    assert staged == pytest.approx(memory.kv * (share - 2 / ROUNDS / of_kv.layers), rel=EXACT)
    for rank in ranks:
        assert sum(rank["weights"]) == pytest.approx(memory.weights, rel=TOLERANCE)
        held = [bool(size) for size in rank["weights"]]
        assert held == [i == 0 or engine.weights != "inplace" for i in range(len(held))]
        assert rank["kv"] == pytest.approx(memory.kv, rel=EXACT)
        for layout, blocks in zip(engine.layouts, rank["blocks"], strict=True):
            tokens = blocks * engine.block_size
            assert rank["kv"] == tokens * of_kv.kv_bytes_per_token(layout.tp)
            assert tokens == pytest.approx(memory.kv_tokens[layout.tp], rel=EXACT)
        assert rank["staged"] in (staged, 0)
        for size, expected, largest in zip(rank["runners"], buffers, rank["largest"], strict=True):
            assert size == pytest.approx(expected, rel=TOLERANCE), largest


def test_an_engine_allocates_what_is_computed(llm: Any) -> None:
    check_allocated(llm)

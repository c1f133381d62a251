"""Decode steps of one rank's shard: by tensor parallelism, batch and context.

On a GPU a step is one CUDA graph: matrix products by cuBLAS, the rest by the Triton kernels of
`triton_ops`. There is no communication in it; `profiles` adds what a model says about that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from benchmarks.gpu import torch_ops
from benchmarks.gpu.decode_model import DecodeShard, ops_for
from benchmarks.gpu.kv_blocks import BLOCK
from benchmarks.gpu.shapes import TINY, ModelShape, Scale
from benchmarks.gpu.timing import Stopwatch, milliseconds

_MEMORY_SHARE = 0.9
"""Of the device, for weights and KV, as engines have it."""

_RESERVE = 4 << 30
"""Bytes of that for activations and graphs."""

_TOLERANCE = 3e-2
"""Of logits in bfloat16, between two ways to compute them; rounding alone is about 1e-2."""


@torch.inference_mode()
def measure(stopwatch: Stopwatch, scale: Scale, copy_rate: float) -> dict[str, Any]:
    """Time a step of every combination whose KV fits.

    Args:
        copy_rate: the copy ceiling, bytes read plus bytes written per second.
    """
    error = check_ops(stopwatch.device, ops_for(stopwatch.device))
    rows: list[dict[str, Any]] = []
    strided: list[dict[str, Any]] = []
    for shape in scale.models:
        for tp in scale.tps:
            rows += _measure_shard(stopwatch, scale, shape, tp, copy_rate)
            if tp > 1:
                strided += _compare_strided(stopwatch, scale, shape, tp)
    on_gpu = stopwatch.device.type == "cuda"
    return {
        "attention": "Triton, split over the context, paged" if on_gpu else "torch, paged",
        "matrix_products": "cuBLAS" if on_gpu else "torch",
        "cuda_graph": on_gpu,
        "communication": "none",
        "includes": "embedding, all layers, LM head of the rank, sampling from all logits",
        "error_of_kernels": error,
        "rows": rows,
        "strided_row_parallel": strided,
    }


def check_ops(device: torch.device, ops: ModuleType, dtype: torch.dtype = torch.bfloat16) -> float:
    """Relative error of a small model's logits by `ops`, against those by torch's.

    Raises:
        AssertionError: they differ by more than rounding.
    """
    shard = DecodeShard(TINY, 1, device, positions=512, dtype=dtype)
    step = _Step(shard, shard.new_cache(1 << 20), batch=3, longest=320)
    for number, length in enumerate((1, 77, 320)):
        step.lengths[number] = length
    cache = step.cache.clone()
    expected = shard.logits(step.tokens, cache, step.tables, step.lengths, torch_ops).double()
    found = shard.logits(step.tokens, step.cache, step.tables, step.lengths, ops)
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < _TOLERANCE, f"the kernels' logits are off by {error:.2%}"
    return error


class _Step:
    """What a step of `batch` sequences works on; their lengths can change between its runs."""

    def __init__(self, shard: DecodeShard, cache: torch.Tensor, batch: int, longest: int) -> None:
        self.shard = shard
        self.cache = cache
        device = shard.device
        self.tokens = shard.new_tokens(batch)
        self.lengths = torch.ones(batch, dtype=torch.int32, device=device)
        blocks = min(-(-longest // BLOCK), cache.shape[1] // batch)
        # Scattered over the pool, as in an engine that has run for a while.
        ids = torch.randperm(cache.shape[1], device=device, dtype=torch.int32)
        self.tables = ids[: batch * blocks].view(batch, blocks)
        self._gathered = shard.new_gathered(batch)

    @property
    def longest(self) -> int:
        """Tokens for which each sequence has blocks."""
        return self.tables.shape[1] * BLOCK

    def run(self) -> torch.Tensor:
        """The step, kernel by kernel."""
        logits = self.shard.logits(
            self.tokens, self.cache, self.tables, self.lengths, ops_for(self.shard.device)
        )
        return self.shard.sample(logits, self._gathered)

    def captured(self) -> Callable[[], object]:
        """The step as one CUDA graph, where there are such."""
        if self.shard.device.type == "cpu":
            return self.run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph.replay


def _measure_shard(
    stopwatch: Stopwatch, scale: Scale, shape: ModelShape, tp: int, copy_rate: float
) -> Iterator[dict[str, Any]]:
    shard = DecodeShard(shape, tp, stopwatch.device, positions=scale.contexts[-1])
    cache = shard.new_cache(_kv_bytes(stopwatch.device, scale))
    for batch in scale.batches:
        step = _Step(shard, cache, batch, scale.contexts[-1])
        contexts = [context for context in scale.contexts if context <= step.longest]
        if not contexts:
            continue
        run = step.captured()
        for context in contexts:
            step.lengths.fill_(context)
            timing = stopwatch.measure(run)
            read = shard.num_bytes + batch * context * shard.token_bytes
            yield {
                "model": shape.name,
                "tp": tp,
                "batch": batch,
                "context": context,
                **milliseconds(timing),
                "bytes_read": read,
                "share_of_copy": read / timing.median / copy_rate,
            }
        del step, run
    del shard, cache
    _give_back()


def _compare_strided(
    stopwatch: Stopwatch, scale: Scale, shape: ModelShape, tp: int
) -> list[dict[str, Any]]:
    """The same step with row-parallel matrices as a reshard in place leaves them."""
    context = scale.contexts[0]
    times: dict[bool, dict[int, float]] = {}
    for strided in (False, True):
        shard = DecodeShard(shape, tp, stopwatch.device, positions=context, strided=strided)
        cache = shard.new_cache(scale.batches[-1] * (context + BLOCK) * shard.token_bytes)
        times[strided] = {}
        for batch in scale.batches[:: max(1, len(scale.batches) // 3)]:
            step = _Step(shard, cache, batch, context)
            run = step.captured()
            step.lengths.fill_(context)
            times[strided][batch] = stopwatch.measure(run).median
            del step, run
        del shard, cache
        _give_back()
    return [
        {
            "model": shape.name,
            "tp": tp,
            "batch": batch,
            "context": context,
            "contiguous_ms": round(seconds * 1e3, 5),
            "strided_ms": round(times[True][batch] * 1e3, 5),
            "strided_over_contiguous": times[True][batch] / seconds,
        }
        for batch, seconds in times[False].items()
    ]


def _kv_bytes(device: torch.device, scale: Scale) -> int:
    if scale.decode_kv_bytes is not None:
        return scale.decode_kv_bytes
    _give_back()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1 - _MEMORY_SHARE) * total - _RESERVE)


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

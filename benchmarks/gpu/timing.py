"""Time on a device: how much is measured, and medians of several runs, without compilation and
without the cache's help."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.record import Summary
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize

_FLUSH_BYTES = 256 << 20
"""Written before each run on a GPU: several times the L2 of the largest ones."""


TINY = ModelSize(2, 64, 8, 4, 16, 128, 512, tied=False)


@dataclass(frozen=True)
class Scale:
    """How much is measured; by default all of it.

    Attributes:
        model: a dense decoder.
        copies: bytes of a copy, ascending.
        requests, tokens: what KV is moved for, and how much of each.
        wide: tensor parallelism at the far end of that move.
        kv_bytes: bound on the KV of one measurement, over all layers.
        repeats: runs of which the median is taken.
    """

    model: ModelSize
    copies: tuple[int, ...] = tuple(n << 20 for n in (1, 4, 16, 64, 256, 1024, 4096))
    requests: tuple[int, ...] = (1, 4, 16, 64)
    tokens: tuple[int, ...] = (2048, 8192, 32768)
    wide: tuple[int, ...] = (2, 8)
    kv_bytes: int = 48 << 30
    repeats: int = 9


def scale_of(device: torch.device, quick: bool) -> Scale:
    """Of a GPU all of it, for Llama-3.1-8B, or in a minute the most important; of CPU tiny
    shapes."""
    if device.type == "cpu":
        return Scale(TINY, (1 << 16, 1 << 20), (1, 3), (32, 64), (2, 4), 1 << 20, repeats=2)
    whole = Scale(ModelSize.of(MODEL_SHAPES["llama-3.1-8b"]))
    if not quick:
        return whole
    sizes: dict[str, Any] = {"requests": (1, 16), "tokens": (2048, 8192), "wide": (2,)}
    copies = tuple(n << 20 for n in (16, 256, 1024))
    return replace(whole, copies=copies, kv_bytes=16 << 30, repeats=5, **sizes)


def milliseconds(timing: Summary) -> dict[str, float]:
    """Of seconds, for results."""
    return {
        "ms": round(timing.median * 1e3, 5),
        "low_ms": round(timing.low * 1e3, 5),
        "high_ms": round(timing.high * 1e3, 5),
        "repeats": timing.repeats,
    }


class Stopwatch:
    """Times runs on `device`: by events on a GPU, by the clock on CPU."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self._repeats = repeats
        self._flush = (
            torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
            if device.type == "cuda"
            else None
        )

    def measure(self, run: Callable[[], object]) -> Summary:
        """Seconds that `run` takes, warmed up."""
        run()
        runs = [self._start(run) for _ in range(self._repeats)]
        self.synchronize()
        return Summary.of([finish() for finish in runs])

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _start(self, run: Callable[[], object]) -> Callable[[], float]:
        """Begin a run; what is returned tells the seconds, once the device has been waited for."""
        if self._flush is None:
            begun = time.perf_counter()
            run()
            seconds = max(time.perf_counter() - begun, 1e-9)
            return lambda: seconds
        # Takes the device so long that the run is queued by the time it is done.
        self._flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        return lambda: begin.elapsed_time(end) / 1e3

"""Time on a device: medians of several runs, without compilation and without the cache's help."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.record import Summary

_FLUSH_BYTES = 256 << 20
"""Written before each run on a GPU: several times the L2 of the largest ones."""


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
        return self.measure_cycle([run])[0]

    def measure_cycle(self, runs: Sequence[Callable[[], object]]) -> list[Summary]:
        """Time each of `runs`, which are made one after the other, again and again."""
        for run in runs:
            run()
        rounds = [[self._start(run) for run in runs] for _ in range(self._repeats)]
        self.synchronize()
        return [Summary.of([finish() for finish in column]) for column in zip(*rounds, strict=True)]

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

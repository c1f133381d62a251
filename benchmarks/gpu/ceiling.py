"""The ceilings: how fast this device copies, and how fast it swaps in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.shapes import Scale, random_like
from benchmarks.gpu.timing import Stopwatch
from pat_vllm.kernels.swap import RowSwap, prepare

_LARGE = 256 << 20
"""Copies from this size on make the ceiling; smaller ones end before they are at full speed."""


def measure(stopwatch: Stopwatch, scale: Scale) -> dict[str, Any]:
    """Copy and swap at each size.

    Returns:
        `copy_bytes_per_second`: the copy ceiling, bytes read plus bytes written per second, the
        best of torch and Triton among the largest copies; `swap_bytes_per_second`: likewise of
        swaps of two halves of a tensor; and `rows`, one for each size.
    """
    rows = []
    for size in scale.copies:
        source = random_like(torch.empty(size // 8, dtype=torch.int64, device=stopwatch.device))
        target = torch.empty_like(source)
        row: dict[str, Any] = {"bytes": size}
        for name, copy in _copies(source, target):
            target.fill_(-1)
            timing = stopwatch.measure(copy)
            assert torch.equal(source, target), f"{name} copies wrongly"
            row[f"{name}_bytes_per_second"] = 2 * size / timing.median
            row[name] = timing.to_json()
        half = len(source) // 2
        swap = prepare([[RowSwap(source, 0, half, half)]])
        timing = stopwatch.measure(swap.run)
        # A warm-up and the repeats: the halves have traded places that often.
        for _ in range((timing.repeats + 1) % 2):
            swap.run()
        assert torch.equal(source, target), "the halves did not come back"
        row["swap_bytes_per_second"] = 2 * swap.num_bytes / timing.median
        row["swap"] = timing.to_json()
        rows.append(row)
    large = [row for row in rows if row["bytes"] >= min(_LARGE, scale.copies[-1])]
    copies = ("torch_bytes_per_second", "triton_bytes_per_second")
    return {
        "copy_bytes_per_second": max(row.get(name, 0.0) for row in large for name in copies),
        "swap_bytes_per_second": max(row["swap_bytes_per_second"] for row in large),
        "rows": rows,
    }


def _copies(source: torch.Tensor, target: torch.Tensor) -> list[tuple[str, Callable[[], object]]]:
    copies: list[tuple[str, Callable[[], object]]] = [("torch", lambda: target.copy_(source))]
    if source.is_cuda:
        from benchmarks.gpu.triton_ops import copy

        copies.append(("triton", lambda: copy(source, target)))
    return copies

"""The ceilings: how fast this device copies, and how fast it swaps in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.shapes import Scale
from benchmarks.gpu.timing import Stopwatch, milliseconds
from pat_vllm.kernels.swap import RowSwap, prepare

_LARGE = 256 << 20
"""Copies from this size on make the ceiling; smaller ones end before they are at full speed."""


def measure(stopwatch: Stopwatch, scale: Scale) -> dict[str, Any]:
    """Copy and swap at each size.

    Returns:
        `copy_bytes_per_second`: the copy ceiling, bytes read plus bytes written per second, the
        best of the largest copies; `swap_bytes_per_second`: likewise of swaps of two
        halves of a tensor; `rows`, one for each size; `gpus`, the rate of torch's largest copy on
        each GPU.

    Raises:
        AssertionError: what was swapped is wrong.
    """
    sizes = scale.copies
    rows = []
    for size in sizes:
        source = random_like(torch.empty(size // 8, dtype=torch.int64, device=stopwatch.device))
        target = torch.empty_like(source)
        row: dict[str, Any] = {"bytes": size}
        timing = stopwatch.measure(partial(target.copy_, source))
        row["copy_bytes_per_second"] = 2 * size / timing.median
        row["copy"] = milliseconds(timing)
        half = len(source) // 2
        swap = prepare([[RowSwap(source, 0, half, half)]])
        timing = stopwatch.measure(swap.run)
        # A warm-up and the repeats: the halves have traded places that often.
        for _ in range((timing.repeats + 1) % 2):
            swap.run()
        assert torch.equal(source, target), "the halves did not come back"
        row["swap_bytes_per_second"] = 2 * swap.num_bytes / timing.median
        row["swap"] = milliseconds(timing)
        rows.append(row)
    gpus = torch.cuda.device_count() if stopwatch.device.type == "cuda" else 0
    large = [row for row in rows if row["bytes"] >= min(_LARGE, sizes[-1])]
    return {
        "copy_bytes_per_second": max(row["copy_bytes_per_second"] for row in large),
        "swap_bytes_per_second": max(row["swap_bytes_per_second"] for row in large),
        "rows": rows,
        "gpus": [_copy_rate(gpu, scale) for gpu in range(gpus)],
    }


def _copy_rate(gpu: int, scale: Scale) -> float:
    size = scale.copies[-1]
    with torch.cuda.device(gpu):
        stopwatch = Stopwatch(torch.device("cuda", gpu), scale.repeats)
        source, target = (torch.empty(size, dtype=torch.uint8, device=gpu) for _ in range(2))
        return 2 * size / stopwatch.measure(lambda: target.copy_(source)).median


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with random bits (of each 8 bytes all but one), and return it."""
    tensor.view(torch.int64).random_()
    return tensor

"""The ceilings: how fast this device copies, and how fast it swaps in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu.timing import Scale, Stopwatch
from pat_vllm.kernels.swap import RowSwap, prepare

_LARGE = 256 << 20
"""Copies from this size on make the ceiling; smaller ones end before they are at full speed."""


def measure(stopwatch: Stopwatch, scale: Scale) -> dict[str, Any]:
    """Copy and swap at each size.

    Returns:
        `copy_bytes_per_second`: the copy ceiling, bytes read plus bytes written per second, the
        best of the largest copies; `tables`: one, with a row for each size.

    Raises:
        AssertionError: what was swapped is wrong.
    """
    rows = []
    for size in scale.copies:
        source = random_like(torch.empty(size // 8, dtype=torch.int64, device=stopwatch.device))
        target = torch.empty_like(source)
        copied = stopwatch.measure(partial(target.copy_, source))
        half = len(source) // 2
        swap = prepare([[RowSwap(source, 0, half, half)]])
        swapped = stopwatch.measure(swap.run)
        # A warm-up and the repeats: the halves have traded places that often.
        for _ in range((swapped.repeats + 1) % 2):
            swap.run()
        assert torch.equal(source, target), "the halves did not come back"
        rows.append(
            {
                "MiB": size / 2**20,
                "copy GB/s": 2 * size / copied.median / 1e9,
                "swap GB/s": 2 * swap.num_bytes / swapped.median / 1e9,
            }
        )
    large = rows if scale.copies[-1] < _LARGE else [r for r in rows if r["MiB"] >= _LARGE / 2**20]
    copy = max(row["copy GB/s"] for row in large)
    return {
        "copy_bytes_per_second": copy * 1e9,
        "about": (
            f"Copies at {copy:,.0f} GB/s, bytes read plus bytes written, the best of the large "
            "ones. Shares below are of that."
        ),
        "tables": [rows],
    }


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with random bits (of each 8 bytes all but one), and return it."""
    tensor.view(torch.int64).random_()
    return tensor

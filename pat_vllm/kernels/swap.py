"""Rows of tensors trade places, with little or no memory beside them.

On CUDA one Triton launch does all swaps of a round, however many tensors they are in: a table in
device memory lists equal chunks of them, and both sides of a chunk pass through registers.
Elsewhere, and for ranges that are no multiples of 16 bytes, torch copies through a small staging
buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

_STAGING_BYTES = 16 << 20
"""Bound on the memory that a run takes beside the tensors. The kernel takes none."""

_CPU_STAGING_BYTES = 512 << 10
"""A chunk of both sides and this much staging stay in a core's cache. More is slower."""

_CHUNK_BYTES = 64 << 10
"""Bytes of each side for one program of the kernel. Long ranges occupy many programs."""

_ACCESS_BYTES = 16


class RowSwap(NamedTuple):
    """Rows `a` to `a + length` of `tensor` trade places with rows `b` to `b + length`.

    `tensor` is contiguous, of any dtype, and has one dimension or more. Rows are along dimension
    `dim`: they trade places at every index of the dimensions before it.
    """

    tensor: torch.Tensor
    a: int
    b: int
    length: int
    dim: int = 0


class ByteSwaps:
    """What `prepare` returns: swaps that can be run any number of times.

    It holds the tensors' addresses, so the tensors must not move. It keeps them alive.

    Attributes:
        num_bytes: bytes of both sides of all pairs: a run reads and writes each once.
    """

    def __init__(self, num_bytes: int, steps: Sequence[Callable[[], None]]) -> None:
        self.num_bytes = num_bytes
        self._steps = tuple(steps)

    @torch.inference_mode()
    def run(self) -> None:
        """Make the swaps, round after round, on the current stream. Does not wait for a device."""
        for step in self._steps:
            step()


@torch.inference_mode()
def prepare(rounds: Iterable[Iterable[RowSwap]]) -> ByteSwaps:
    """Make `rounds` of swaps ready to be run.

    Args:
        rounds: done one after the other. Within a round no two ranges may overlap.

    Raises:
        ValueError: a range is not inside its tensor, ranges overlap, a tensor is not contiguous,
            or tensors are on several devices.
    """
    steps: list[Callable[[], None]] = []
    devices: set[torch.device] = set()
    num_bytes = 0
    for swaps in rounds:
        pairs = [(a, b) for a, b in (_sides(*swap) for swap in swaps) if a.nbytes]
        _check_disjoint(pairs)
        devices |= {a.device for a, _ in pairs}
        if len(devices) > 1:
            raise ValueError(f"one device is needed, got {sorted(map(str, devices))}")
        num_bytes += sum(2 * a.nbytes for a, _ in pairs)
        by_kernel = [(a, b) for a, b in pairs if _on_gpu(a) and _aligned(a, b)]
        by_copies = [(a, b) for a, b in pairs if not (_on_gpu(a) and _aligned(a, b))]
        if by_kernel:
            steps.append(_KernelRound(by_kernel))
        if by_copies:
            steps.append(_CopyRound(by_copies))
    return ByteSwaps(num_bytes, steps)


class _KernelRound:
    """One launch for all pairs; of `uint8` tensors whose addresses and sizes are aligned."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        from pat_vllm.kernels.device import TILE, WARPS, swap_kernel

        self._pairs = pairs
        chunks = []
        for a, b in pairs:
            within = np.arange(0, a.shape[1], _CHUNK_BYTES)
            words = np.minimum(a.shape[1] - within, _CHUNK_BYTES) // 8
            sides = [(_starts(side)[:, None] + within).ravel() for side in (a, b)]
            chunks.append(np.stack([*sides, np.tile(words, len(a))], axis=1))
        self._table = torch.from_numpy(np.concatenate(chunks)).to(pairs[0][0].device)

        def launch(table: torch.Tensor) -> None:
            swap_kernel[(len(table),)](table, BLOCK=TILE, num_warps=WARPS)

        self._launch = launch
        # A launch without work compiles the kernel, so that no switch waits for the compiler.
        launch(torch.zeros_like(self._table[:1]))

    def __call__(self) -> None:
        self._launch(self._table)


class _CopyRound:
    """Three torch copies for each piece of a pair that fits in the staging buffer."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        size = _CPU_STAGING_BYTES if pairs[0][0].device.type == "cpu" else _STAGING_BYTES
        self._pieces = [
            _widest(x, y)
            for a, b in pairs
            for x, y in zip(_split(a, size), _split(b, size), strict=True)
        ]
        self._staging_bytes = max(x.nbytes for x, _ in self._pieces)

    def __call__(self) -> None:
        device = self._pieces[0][0].device
        staging = torch.empty(self._staging_bytes, dtype=torch.uint8, device=device)
        for x, y in self._pieces:
            kept = staging[: x.nbytes].view(x.dtype).view(x.shape)
            kept.copy_(x)
            x.copy_(y)
            y.copy_(kept)


def _sides(
    tensor: torch.Tensor, a: int, b: int, length: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ranges as bytes, `[indices of the dimensions before, bytes of the range]`."""
    if not tensor.is_contiguous() or tensor.dim() == 0:
        raise ValueError(f"rows can be swapped in contiguous tensors, got {tuple(tensor.shape)}")
    rows = tensor.shape[dim]
    if min(a, b, length) < 0 or max(a, b) + length > rows:
        raise ValueError(f"rows {a} and {b} + {length} are not inside the {rows} of a tensor")
    every = tensor.detach().reshape(-1).view(torch.uint8).view(math.prod(tensor.shape[:dim]), -1)
    row = every.shape[1] // rows
    return every.narrow(1, a * row, length * row), every.narrow(1, b * row, length * row)


def _starts(side: torch.Tensor) -> np.ndarray:
    """Address of each range of a side."""
    return side.data_ptr() + np.arange(len(side), dtype=np.int64) * side.stride(0)


def _check_disjoint(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if not pairs:
        return
    sides = [side for pair in pairs for side in pair]
    starts = np.concatenate([_starts(side) for side in sides])
    ends = starts + np.repeat([side.shape[1] for side in sides], [len(side) for side in sides])
    order = np.argsort(starts)
    if (starts[order][1:] < ends[order][:-1]).any():
        raise ValueError("the ranges of a round overlap: put their swaps in several rounds")


def _split(side: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Pieces of at most `size` bytes."""
    for rows in side.split(max(1, size // side.shape[1])):
        yield from rows.split(size, dim=1)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _aligned(a: torch.Tensor, b: torch.Tensor) -> bool:
    between = a.stride(0) if len(a) > 1 else 0
    sizes = (a.data_ptr(), b.data_ptr(), a.shape[1], between)
    return not any(n % _ACCESS_BYTES for n in sizes)


def _widest(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bytes in 8-byte elements where possible: they are copied faster than narrow ones."""
    if any(n % 8 for n in (x.storage_offset(), y.storage_offset(), x.shape[1], x.stride(0))):
        return x, y
    return x.view(torch.int64), y.view(torch.int64)

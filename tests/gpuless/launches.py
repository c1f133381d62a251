"""PAT's Triton kernels on imitated devices: the same bytes move, and each program's are told."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.gpuless.happens_before import Part, disjoint
from tests.gpuless.streams import current_stream, unseen

if TYPE_CHECKING:
    from tests.gpuless.devices import Devices


class _Kernel:
    """`kernel[grid](...)`, without the grid."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch = launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch


def kernels(devices: Devices) -> Any:
    """In place of the module `pat_vllm.kernels.device`."""
    module: Any = ModuleType("pat_vllm.kernels.device")
    module.TILE, module.WARPS = 1024, 4
    module.swap_kernel = _Kernel(partial(_swap, devices))
    module.copy_runs_kernel = _Kernel(partial(_copy_runs, devices))
    return module


def _swap(devices: Devices, table: torch.Tensor, **constants: Any) -> None:
    """Row by row of `table`, two ranges trade places; a program makes one row."""
    actor = current_stream().work()
    devices.access(actor, table, writes=False)
    with unseen():
        rows = [(a, b, 8 * words) for a, b, words in table.tolist() if words]
    sides = [(start, start + size) for a, b, size in rows for start in (a, b)]
    if not disjoint(sides):
        devices.races.overlap("swap_kernel")
    for a, b, size in rows:
        for start in (a, b):
            memory = devices.memory_at(start)
            part = Part.flat(start - memory.address, size)
            devices.races.access(actor, memory, part, writes=True)
        kept = ctypes.string_at(a, size)
        ctypes.memmove(a, b, size)
        ctypes.memmove(b, kept, size)


def _copy_runs(
    devices: Devices,
    view: torch.Tensor,
    staged: torch.Tensor,
    runs: torch.Tensor,
    num_rows: int,
    *,
    SEGMENTS: int,
    STRIDE: int,
    WIDTH: int,
    PACK: bool,
    **constants: Any,
) -> None:
    """Runs of `view` are copied to `staged`, where they lie end to end, or back."""
    actor = current_stream().work()
    devices.access(actor, runs, writes=False)
    devices.access(actor, staged, writes=PACK)
    with unseen():
        starts = runs.tolist()
        memory, stage = devices.memory_of(view), devices.memory_of(staged)
        assert memory is not None and stage is not None
        base = view.data_ptr() - memory.address
        at = staged.data_ptr() - stage.address
    assert num_rows == len(starts) * SEGMENTS
    if not PACK and len(set(starts)) < len(starts):
        devices.races.overlap("copy_runs_kernel")
    size = SEGMENTS * WIDTH * 8
    in_view, in_stage = np.frombuffer(memory, np.uint8), np.frombuffer(stage, np.uint8)
    for i, start in enumerate(starts):
        run = Part(base + 8 * start, (SEGMENTS, WIDTH * 8), (STRIDE * 8, 1))
        devices.races.access(actor, memory, run, writes=not PACK)
        there = run.within(in_view)
        here = Part(at + i * size, there.shape, (WIDTH * 8, 1)).within(in_stage)
        if PACK:
            here[...] = there
        else:
            there[...] = here

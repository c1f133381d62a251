"""PAT's kernels in Triton's interpreter, on memory of which little is there. A program.

Buffers are larger than 2^31 words. The operating system gives them memory page by page, where they
are touched.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from typing import Any

import torch

from pat_vllm.kernels import kv, swap

MAP_NORESERVE = 0x4000
"""Linux's; Python's `mmap` names it from 3.13 on."""

LIMIT = 1 << 31
HEADS, TOKENS, CONTENT = 8, 16, 64
"""Of a block of Llama-3.1-8B in bfloat16, as words of 8 bytes."""

RUN = TOKENS * CONTENT
BLOCKS = LIMIT // (HEADS * RUN) + 2
WORDS = BLOCKS * HEADS * RUN
PROGRAMS = (0, 1, LIMIT // RUN // 2, LIMIT // RUN - 1, LIMIT // RUN, WORDS // RUN - 1)
"""Those that run. Each copies a run: one head of one block."""


def sparse(words: int) -> torch.Tensor:
    """Zeros that take no memory until they are written; offsets that wrap stay within."""
    guard = LIMIT
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    memory = mmap.mmap(-1, 8 * (guard + words), flags=flags)
    return torch.frombuffer(memory, dtype=torch.int64)[guard:]


class Some:
    """A kernel of which only `PROGRAMS` run: the interpreter would take days for all."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        from triton.runtime.interpreter import interpreter_builder as builder

        def launch(*args: Any, **kwargs: Any) -> None:
            assert grid == (PROGRAMS[-1] + 1,)
            for program in PROGRAMS:
                place = program, 0, 0
                builder.set_grid_idx = lambda *_, place=place: setattr(builder, "grid_idx", place)
                try:
                    self._kernel[(1,)](*args, **kwargs)
                finally:
                    del builder.set_grid_idx

        return launch


def kv_is_right(heads_first: bool) -> bool:
    """Pack and unpack a whole layer whose blocks are in reverse order."""
    device: Any = import_module("pat_vllm.kernels.device")  # a mutated one, too
    memory, staged = sparse(WORDS), sparse(WORDS)
    if heads_first:
        view = memory.view(BLOCKS, HEADS, TOKENS, CONTENT)
    else:
        view = memory.view(BLOCKS, TOKENS, HEADS, CONTENT).transpose(1, 2)
    blocks = kv.TableBlocks([[(range(BLOCKS - 1, -1, -1), range(HEADS))]], view)
    assert blocks.counts == [WORDS]
    runs = [view[BLOCKS - 1 - program // HEADS, program % HEADS] for program in PROGRAMS]
    parts = [
        staged[program * RUN : (program + 1) * RUN].view(TOKENS, CONTENT) for program in PROGRAMS
    ]
    kernel, right = device.copy_runs_kernel, True
    device.copy_runs_kernel = Some(kernel)
    try:
        for run in runs:
            run.random_()
        blocks.pack(view, staged)
        right &= all(map(torch.equal, runs, parts))
        for part in parts:
            part.random_()
        blocks.unpack([staged], view)
        right &= all(map(torch.equal, runs, parts))
    finally:
        device.copy_runs_kernel = kernel
    return right


def swap_is_right() -> bool:
    """Rows at both ends of a tensor trade places, and rows beyond the limit."""
    columns = 1 << 15
    tensor = sparse(LIMIT + 8 * columns).view(-1, columns)
    last = len(tensor) - 2
    places = {0: last, last - 4: last - 2}
    rows = [tensor[start : start + 2] for start in chain(places, places.values())]
    for row in rows:
        row.random_()
    before = [row.clone() for row in rows]
    swap.prepare([[swap.RowSwap(tensor, a, b, 2) for a, b in places.items()]]).run()
    half = len(places)
    return all(map(torch.equal, rows, before[half:] + before[:half]))


def main() -> None:
    from triton.runtime.interpreter import GridExecutor

    # Arguments are on the host already, and a copy would touch all of them.
    GridExecutor._restore_args_dev = lambda *args: None  # type: ignore[method-assign]
    swap._on_gpu = lambda tensor: True
    torch.set_num_threads(1)
    checks = {
        "LBHNC": lambda: kv_is_right(heads_first=True),
        "LBNHC": lambda: kv_is_right(heads_first=False),
        "swap": swap_is_right,
    }
    print(json.dumps([name for name, check in checks.items() if check()]))


if __name__ == "__main__":
    main()

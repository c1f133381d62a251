"""The Triton kernels. Import this module only where Triton is installed.

All of them move 8-byte words in pairs: 16 bytes per access, neighbouring threads at neighbouring
addresses, several accesses of a thread in flight before the first is used.
"""

from __future__ import annotations

import triton
import triton.language as tl

WARPS = 4
"""Warps of a program."""

TILE = 1024
"""Words (of 8 bytes) that a program has in flight: four 16-byte accesses per thread."""


@triton.jit
def swap_kernel(table, BLOCK: tl.constexpr):
    """Row `program` of `table`, int64 [n, 3]: addresses of two ranges, and their length in words.

    Both ranges are read before either is written, so registers are all the staging there is.
    """
    entry = table + tl.program_id(0).to(tl.int64) * 3
    # What `prepare` has made sure of: it lets the compiler use 16-byte accesses.
    a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int64)), 16)
    b = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.int64)), 16)
    words = tl.multiple_of(tl.load(entry + 2), 2)
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        x = tl.load(a + at, mask=inside)
        y = tl.load(b + at, mask=inside)
        tl.store(a + at, y, mask=inside)
        tl.store(b + at, x, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def copy_runs_kernel(
    view,
    staged,
    runs,
    num_rows,
    SEGMENTS: tl.constexpr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    PACK: tl.constexpr,
):
    """Copy runs of `view` to `staged`, where they lie end to end (`PACK`), or back.

    A run is `SEGMENTS` rows of `WIDTH` words, `STRIDE` words apart in `view`; run `i` starts at
    word `runs[i]` (int64), which is a multiple of `ALIGN`. `num_rows` counts the rows of all runs.
    `PADDED` is `WIDTH` or the next power of two; a program copies `ROWS` rows.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = row < num_rows
    start = tl.multiple_of(tl.load(runs + row // SEGMENTS, mask=known, other=0), ALIGN)
    at = start + row % SEGMENTS * STRIDE
    column = tl.arange(0, PADDED)
    inside = known[:, None]
    if PADDED != WIDTH:
        inside = inside & (column < WIDTH)[None, :]
    in_view = view + at[:, None] + column[None, :]
    in_staged = staged + row[:, None] * WIDTH + column[None, :]
    if PACK:
        tl.store(in_staged, tl.load(in_view, mask=inside), mask=inside)
    else:
        tl.store(in_view, tl.load(in_staged, mask=inside), mask=inside)

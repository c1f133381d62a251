"""Step times of each kind on a grid over (busy replicas, batch, context), interpolated linearly.
Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pat_vllm.predictor.state import Floats
from pat_vllm.predictor.step_base import KNEES

_FAR_BATCH = (4, 64, 4096)
_FAR_CONTEXT = (8, 1_000_000)
"""Nodes beyond the profiled range, as multiples of its end. Beyond the last, which no engine
reaches, the time stays constant."""


def batch_nodes(profiled: Iterable[int]) -> list[float]:
    """Nodes of the batch axis: profiled sizes, the base's knees, powers of two, 0 and far."""
    sizes = sorted(profiled)
    powers = [1 << i for i in range(sizes[-1].bit_length())]
    far = [sizes[-1] * factor for factor in _FAR_BATCH]
    return [float(one) for one in sorted({0, *sizes, *KNEES, *powers, *far})]


def context_nodes(profiled: Iterable[int]) -> list[float]:
    """Nodes of the context axis, total tokens: the profiled ones, powers of two, 0 and far."""
    totals = sorted(max(1, total) for total in profiled)
    powers = [1 << i for i in range(totals[0].bit_length(), totals[-1].bit_length())]
    far = [totals[-1] * factor for factor in _FAR_CONTEXT]
    return [float(one) for one in sorted({0, *totals, *powers, *far})]


class Surface:
    """Interpolates values on a grid; beyond its last nodes it stays constant.

    Args:
        busy, batch, context: the nodes, ascending; batch and context start at 0.
        values: float64 [kinds, busy, batch, context]; between kinds nothing is interpolated.
    """

    def __init__(
        self,
        busy: Sequence[float],
        batch: Sequence[float],
        context: Sequence[float],
        values: Floats,
    ) -> None:
        self._busy, self._last = list(busy), (batch[-1], context[-1])
        self._inner_batch, self._inner_context = np.array(batch[1:-1]), np.array(context[1:-1])
        self._inner = list(batch[1:-1]), list(context[1:-1])
        # Each cell has a polynomial: its corner (x, y), the value there, the
        # slopes along x and y, and that of their product. One gather then serves a point.
        x, y = np.array(batch), np.array(context)
        width, height = np.diff(x)[:, None], np.diff(y)[None, :]
        values = values.reshape(-1, *values.shape[-2:])
        corner = values[:, :-1, :-1]
        along_x = values[:, 1:, :-1] - corner
        along_y = values[:, :-1, 1:] - corner
        twist = values[:, 1:, 1:] - corner - along_x - along_y
        rise = along_x / width, along_y / height, twist / (width * height)
        parts = np.broadcast_arrays(x[:-1, None], y[None, :-1], corner, *rise)
        self._cells = np.array([part.ravel() for part in parts])
        self._points: list[list[float]] = self._cells.T.tolist()
        self._count = corner[0].size

    def at(self, batch: float, context: float, busy: float, kind: int = 0) -> float:
        """The value at one point, in a few microseconds."""
        x, y = min(batch, self._last[0]), min(context, self._last[1])
        columns, rows = self._inner
        cell = bisect_right(columns, x) * (len(rows) + 1) + bisect_right(rows, y)
        nodes = self._busy
        below = max(bisect_right(nodes, busy) - 1, 0)
        cell += (kind * len(nodes) + below) * self._count
        value: float = _polynomial(self._points[cell], x, y)
        if busy <= nodes[below] or below + 1 == len(nodes):
            return value
        weight = (busy - nodes[below]) / (nodes[below + 1] - nodes[below])
        return value + weight * (_polynomial(self._points[cell + self._count], x, y) - value)

    def many(self, batch: Any, context: Any, busy: Any, kind: Any = 0) -> Floats:
        """The values at points; arrays or numbers, which broadcast."""
        x, y = np.minimum(batch, self._last[0]), np.minimum(context, self._last[1])
        cell = self._inner_batch.searchsorted(x, "right") * (len(self._inner_context) + 1)
        cell = cell + self._inner_context.searchsorted(y, "right")
        position = np.interp(busy, self._busy, np.arange(len(self._busy)))
        below = np.floor(position).astype(np.intp)
        cell = cell + (kind * len(self._busy) + below) * self._count
        value: Floats = _polynomial(self._cells.take(cell, axis=1), x, y)
        if len(self._busy) == 1:
            return value
        last = below + 1 == len(self._busy)
        above = _polynomial(self._cells.take(cell + ~last * self._count, axis=1), x, y)
        return value + (position - below) * (above - value)


def _polynomial(cell: Any, x: Any, y: Any) -> Any:
    x0, y0, value, along_x, along_y, twist = cell
    dx = x - x0
    dy = y - y0
    return value + along_x * dx + (along_y + twist * dx) * dy

"""Step times on a grid over (busy replicas, batch, context), interpolated linearly. Pure.

A table that grows along every axis, interpolated linearly, grows everywhere; that is how the
step-time model stays monotone whatever it learned.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pat_vllm.predictor.state import Floats
from pat_vllm.predictor.step_base import KNEES

_NEAR = 1.12
"""Nodes closer than this factor become one."""

_FAR_BATCH = (4, 64, 4096)
_FAR_CONTEXT = (8, 1_000_000)
"""Nodes beyond the profiled range, as multiples of its end. Beyond the last, which no engine
reaches, the time stays constant."""


def batch_nodes(profiled: Iterable[int]) -> list[float]:
    """Nodes of the batch axis: profiled sizes, the base's knees, powers of two, 0 and far."""
    sizes = set(profiled)
    last = max(sizes)
    powers = [1 << i for i in range(last.bit_length())]
    return _spaced([*sorted(sizes), *KNEES, *powers], [last * f for f in _FAR_BATCH])


def context_nodes(profiled: Iterable[int]) -> list[float]:
    """Nodes of the context axis, total tokens: the profiled ones, powers of two, 0 and far."""
    totals = sorted(t for t in set(profiled) if t > 0) or [1]
    first, last = totals[0], totals[-1]
    powers = [1 << i for i in range(first.bit_length(), last.bit_length())]
    return _spaced([*totals, *powers], [last * f for f in _FAR_CONTEXT])


def _spaced(wanted: Iterable[int], far: Iterable[int]) -> list[float]:
    """0, the wanted ones without near repeats (of which the first stays), and the far ones."""
    nodes: list[float] = []
    for one in wanted:
        if all(not 1 / _NEAR < one / node < _NEAR for node in nodes):
            nodes.append(float(one))
    return sorted({0.0, *nodes, *map(float, far)})


def monotone(values: Floats, supported: NDArray[np.bool_]) -> Floats:
    """Values that are non-decreasing along all axes, and as near as can be to the given ones.

    Where they fall, real kernels being better at some batch sizes than at smaller ones, the mean
    (of logarithms) is taken of what the nodes before demand and what those after allow: both grow.
    Only supported nodes have a say. The others (one request with the context of a hundred, say)
    stand for no step, so they give way: they are put between their neighbours.

    Args:
        values: float64 [busy, batch, context], positive.
        supported: bool, broadcastable to it; whether samples are near.
    """
    demanded = _running(np.maximum, np.where(supported, values, -np.inf))
    allowed = _from_the_end(np.minimum, np.where(supported, values, np.inf))
    firm = np.sqrt(np.where(supported, demanded * allowed, 1.0))
    floor = _running(np.maximum, np.where(supported, firm, -np.inf))
    ceiling = _from_the_end(np.minimum, np.where(supported, firm, np.inf))
    between = np.minimum(np.maximum(values, floor), ceiling)
    return _running(np.maximum, np.where(supported, firm, between))


def _from_the_end(extreme: np.ufunc, values: Floats) -> Floats:
    return _running(extreme, values[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]


def _running(extreme: np.ufunc, values: Floats) -> Floats:
    for axis in range(values.ndim):
        values = extreme.accumulate(values, axis=axis)
    return values


class Surface:
    """Interpolates values on a grid; beyond its last nodes it stays constant.

    Args:
        busy, batch, context: the nodes, ascending; batch and context start at 0.
        values: float64 [busy, batch, context].
    """

    def __init__(
        self,
        busy: Sequence[float],
        batch: Sequence[float],
        context: Sequence[float],
        values: Floats,
    ) -> None:
        self._busy, self._batch, self._context = list(busy), list(batch), list(context)
        self._values = values
        self._flat: list[float] | None = None
        self._cells: Floats | None = None
        self._inner_batch = np.array(batch[1:-1])
        self._inner_context = np.array(context[1:-1])

    def with_values(self, values: Floats) -> Surface:
        """Other values on the same nodes."""
        return Surface(self._busy, self._batch, self._context, values)

    def at(self, batch: float, context: float, busy: float) -> float:
        """The value at one point, in a few microseconds."""
        flat = self._flat
        if flat is None:
            flat = self._flat = self._values.ravel().tolist()
        xs, ys = self._batch, self._context
        x = min(batch, xs[-1])
        y = min(context, ys[-1])
        i = bisect_right(xs, x, 1, len(xs) - 1) - 1
        j = bisect_right(ys, y, 1, len(ys) - 1) - 1
        u = (x - xs[i]) / (xs[i + 1] - xs[i])
        v = (y - ys[j]) / (ys[j + 1] - ys[j])
        width = len(ys)
        k, w = self._busy_position(busy)
        corner = (k * len(xs) + i) * width + j
        total = _bilinear(flat, corner, width, u, v)
        if w > 0:
            upper = _bilinear(flat, corner + len(xs) * width, width, u, v)
            total += w * (upper - total)
        return total

    def many(self, batch: Any, context: Any, busy: Any) -> Floats:
        """The values at points; float64 arrays or numbers, which broadcast."""
        cells = self._cells
        if cells is None:
            cells = self._cells = self._make_cells()
        x = np.minimum(batch, self._batch[-1])
        y = np.minimum(context, self._context[-1])
        cell = self._inner_batch.searchsorted(x, "right") * (len(self._context) - 1)
        cell = cell + self._inner_context.searchsorted(y, "right")
        if isinstance(busy, (int, float)):
            k, w = self._busy_position(busy)
            table = cells[k] if w == 0 else (1 - w) * cells[k] + w * cells[k + 1]
            return _polynomial(table.take(cell, axis=1), x, y)
        # An array of busy replicas: between the two tables of each point.
        nodes = np.array(self._busy)
        z = np.minimum(np.maximum(busy, nodes[0]), nodes[-1])
        position = np.interp(z, nodes, np.arange(len(nodes)))
        k_below = position.astype(np.intp)
        k_above = np.minimum(k_below + 1, len(nodes) - 1)
        joined = cells.transpose(1, 0, 2).reshape(cells.shape[1], -1)
        count = cells.shape[2]
        below = _polynomial(joined.take(k_below * count + cell, axis=1), x, y)
        above = _polynomial(joined.take(k_above * count + cell, axis=1), x, y)
        return below + (position - k_below) * (above - below)

    def _busy_position(self, busy: float) -> tuple[int, float]:
        """The node below and the weight of the one above."""
        nodes = self._busy
        if busy <= nodes[0]:
            return 0, 0.0
        if busy >= nodes[-1]:
            return len(nodes) - 1, 0.0
        k = bisect_right(nodes, busy) - 1
        return k, (busy - nodes[k]) / (nodes[k + 1] - nodes[k])

    def _make_cells(self) -> Floats:
        """Each cell's polynomial, float64 [busy, 6, cells]: its corner (x, y), the value there,
        the slopes along x and y, and that of their product. One gather then serves a point."""
        x, y, values = np.array(self._batch), np.array(self._context), self._values
        width, height = np.diff(x)[:, None], np.diff(y)[None, :]
        corner = values[:, :-1, :-1]
        along_x = values[:, 1:, :-1] - corner
        along_y = values[:, :-1, 1:] - corner
        twist = values[:, 1:, 1:] - corner - along_x - along_y
        cells = np.empty((len(values), 6, len(x) - 1, len(y) - 1))
        cells[:, 0] = x[:-1, None]
        cells[:, 1] = y[None, :-1]
        cells[:, 2] = corner
        cells[:, 3] = along_x / width
        cells[:, 4] = along_y / height
        cells[:, 5] = twist / (width * height)
        return cells.reshape(len(values), 6, -1)


def _bilinear(flat: list[float], corner: int, width: int, u: float, v: float) -> float:
    low = flat[corner]
    low += v * (flat[corner + 1] - low)
    corner += width
    high = flat[corner]
    high += v * (flat[corner + 1] - high)
    return low + u * (high - low)


def _polynomial(cell: Floats, x: Any, y: Any) -> Floats:
    x0, y0, value, along_x, along_y, twist = cell
    dx = x - x0
    dy = y - y0
    return value + along_x * dx + (along_y + twist * dx) * dy

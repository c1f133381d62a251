"""How long a step of one replica takes. Pure.

A linear roofline (`step_base`) carries the shape of the curve, LightGBM its residual in the layouts
where cross-validation finds that it helps (`step_residual`). Both are evaluated once, on a grid
(`Surface`); from then on the model interpolates, in microseconds, and real steps correct it
(`correction`). Outside the profiled range it follows the base. What prefill and the longest context
add comes from the base alone.

Each draft length has two grids: steps with no draft to verify and with as many as it makes. Between
them times are linear in the drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pat_vllm.layout import Layout
from pat_vllm.predictor.correction import OnlineCorrection
from pat_vllm.predictor.state import Floats, Ints
from pat_vllm.predictor.step_base import KNEES, StepBase
from pat_vllm.predictor.step_residual import (
    StepFit,
    by_layout,
    cross_validate,
    factors,
    features_of,
    fit_residual,
    learnable,
    of_base,
)
from pat_vllm.profile import Profile, StepSample, StepShape

_FAR_BATCH = (4, 64, 4096)
_FAR_CONTEXT = (8, 1_000_000)
"""Nodes beyond the profiled range, as multiples of its end. Beyond the last, which no engine
reaches, the time stays constant."""
_MOST_DRAFTS = 0.95
"""Largest share of a step's time that drafts are taken to add."""


class Surface:
    """Interpolates values on a grid; beyond its last nodes it stays constant.

    Args:
        busy, batch, context: the nodes, ascending; batch and context start at 0.
        values: float64 [kinds, busy, batch, context]; between kinds nothing is interpolated.
    """

    def __init__(self, busy: list[int], batch: Floats, context: Floats, values: Floats) -> None:
        self._busy, self._last = busy, (float(batch[-1]), float(context[-1]))
        self._inner_batch, self._inner_context = batch[1:-1], context[1:-1]
        self._inner = self._inner_batch.tolist(), self._inner_context.tolist()
        # Each cell has a polynomial: its corner (x, y), the value there, the
        # slopes along x and y, and that of their product. One gather then serves a point.
        x, y = batch, context
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


@dataclass(frozen=True)
class _LayoutModel:
    """The model of one layout, uncorrected.

    Attributes:
        grid: steps without drafts are its first kind.
        kinds: by draft length the kinds of its steps with no draft and with all, and for how many
            drafts of a request the latter stands, int64 [3, longest + 1]. A length that was not
            profiled has those of the nearest one.
    """

    base: StepBase
    grid: Surface
    kinds: Ints

    def at(self, shape: StepShape) -> float:
        """Seconds of one decode step."""
        none, every, drafts = self.kinds[:, min(shape.k, self.kinds.shape[1] - 1)].tolist()
        seconds = self.grid.at(shape.batch, shape.context, shape.busy, none)
        if shape.drafts:
            drafted = self.grid.at(shape.batch, shape.context, shape.busy, every)
            seconds += (drafted - seconds) * shape.drafts / (drafts * shape.batch)
        return seconds + self.base.longest * shape.longest

    def many(self, batch: Any, context: Any, busy: Any, drafts: Any, k: Any) -> Floats:
        """Seconds of decode steps, but for what their longest contexts add."""
        none, every, of_request = self.kinds[:, np.minimum(k, self.kinds.shape[1] - 1)]
        seconds: Floats = self.grid.many(batch, context, busy, none)
        if not np.any(drafts):
            return seconds
        drafted = self.grid.many(batch, context, busy, every)
        return seconds + (drafted - seconds) * (drafts / (of_request * np.maximum(batch, 1e-9)))


class StepTimeModel:
    """Predicts the seconds of a step. Made by `fit`. Not thread-safe.

    Attributes:
        fits: by layout, what the profile led to.
    """

    def __init__(self, models: dict[Layout, _LayoutModel], fits: Mapping[Layout, StepFit]) -> None:
        self.fits = fits
        self._models = models
        self._correction = OnlineCorrection(models)

    @classmethod
    def fit(cls, profile: Profile) -> StepTimeModel:
        """Learn from a profile."""
        samples = by_layout(profile.steps)
        bases = {layout: StepBase.fit(steps, profile.chosen) for layout, steps in samples.items()}
        decodes = by_layout(profile.steps, decodes=True)
        fits = cross_validate(profile.steps, profile.chosen)
        learned = any(fit.learned for fit in fits.values())
        booster = fit_residual(bases, learnable(decodes)) if learned else None
        models = {
            layout: _compile(
                layout, bases[layout], steps, booster if fits[layout].learned else None
            )
            for layout, steps in decodes.items()
        }
        return cls(models, {layout: fits[layout] for layout in models})

    def seconds(
        self,
        layout: Layout,
        batch: ArrayLike,
        context: ArrayLike,
        longest: ArrayLike,
        prefill: ArrayLike = 0,
        busy: ArrayLike = 1,
        drafts: ArrayLike = 0,
        k: ArrayLike = 0,
    ) -> Floats:
        """Seconds of steps, with the online correction; the arguments are as in `StepShape`.

        They broadcast and may be fractional (a mean over replicas), but not negative.

        Raises:
            KeyError: `layout` is not one of the profile.
        """
        model = self._models[layout]
        batch, context, longest, prefill, busy, drafts = (
            value if isinstance(value, int) else np.asarray(value, np.float64)
            for value in (batch, context, longest, prefill, busy, drafts)
        )
        extra = model.base.extra(batch, longest, prefill, busy)
        predicted = model.many(batch, context, busy, drafts, k) + extra
        share: Any = 0.0
        if np.any(k):
            plain = model.many(batch, context, busy, 0, 0) + extra
            share = np.clip(1 - plain / predicted, 0.0, _MOST_DRAFTS)
        return np.asarray(predicted * self._correction.factor(layout, np.asarray(batch), share))

    def step(self, layout: Layout, shape: StepShape) -> float:
        """Seconds of one step, as `seconds` gives them."""
        return float(self.seconds(layout, *astuple(shape)))

    def observe(self, layout: Layout, shape: StepShape, seconds: float) -> float | None:
        """Learn from a real step.

        Steps with prefill are left out: their time depends on how the prompts are cut, and they
        are few. So are steps with drafts where the profile has none.

        Returns:
            What was predicted before, seconds; None of a step that is left out.
        """
        if shape.prefill or not shape.batch:
            return None
        model = self._models[layout]
        if (shape.drafts or shape.k) and not model.base.has_drafts:
            return None
        predicted, drafts = model.at(shape), 0.0
        if shape.k:
            plain = model.at(replace(shape, drafts=0, k=0))
            drafts = min(max(1 - plain / predicted, 0.0), _MOST_DRAFTS)
        ratio = seconds / predicted
        return predicted * self._correction.observe(layout, shape.batch, ratio, drafts)

    @property
    def correction_version(self) -> int:
        """Grows whenever a correction has changed by more than ~3 % since it last did."""
        return self._correction.version


def _compile(
    layout: Layout, base: StepBase, decodes: Sequence[StepSample], booster: Any
) -> _LayoutModel:
    """Evaluate base and residual on a grid."""
    sizes, totals = [s.batch for s in decodes], [max(s.context, 1) for s in decodes]
    means = [total / size for total, size in zip(totals, sizes, strict=True)]
    busy = sorted({1, layout.replicas, *(s.busy for s in decodes)})
    batch = _nodes(sizes, _FAR_BATCH, 0, KNEES)
    context = _nodes(totals, _FAR_CONTEXT, min(totals))
    # Without samples with drafts the base says what one for each request takes.
    lengths = sorted({s.k for s in decodes} - {0}) or [1]
    kinds = np.array([(0, 0), *((k, each) for k in lengths for each in (0, k))])
    axes = np.meshgrid(np.arange(len(kinds)), np.array(busy, float), batch, context, indexing="ij")
    k, each = np.moveaxis(kinds[axes[0]], -1, 0)
    values = of_base(base, axes[2], axes[3], axes[1], each * axes[2], k)
    inside = np.minimum(np.maximum(axes[2], min(sizes)), max(sizes))
    if booster is not None:
        # Beyond the samples the residual stays as it is at their edge.
        mean = np.minimum(np.maximum(axes[3] / inside, min(means)), max(means))
        features = features_of(layout, inside, mean, 1.0, axes[1], each, k)
        values = values * factors(booster, features).reshape(values.shape)
    every = np.arange(lengths[-1] + 1)
    nearest = abs(every[:, None] - np.array(lengths)).argmin(axis=1)
    of_length = np.array([1 + 2 * nearest, 2 + 2 * nearest, np.array(lengths)[nearest]])
    of_length[0, 0] = 0
    return _LayoutModel(base, Surface(busy, batch, context, values), of_length)


def _nodes(
    profiled: Collection[int], far: Sequence[int], least: int, more: Sequence[int] = ()
) -> Floats:
    """Nodes of an axis: 0, those profiled, powers of two above `least`, `more`, and far ones."""
    most = max(profiled)
    powers = [1 << i for i in range(most.bit_length()) if 1 << i > least]
    every = {0, *profiled, *powers, *more, *(most * factor for factor in far)}
    return np.array(sorted(every), np.float64)

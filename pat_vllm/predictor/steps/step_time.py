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
from pat_vllm.predictor.state import Floats, Ints
from pat_vllm.predictor.steps.correction import OnlineCorrection
from pat_vllm.predictor.steps.step_base import KNEES, StepBase
from pat_vllm.predictor.steps.step_residual import (
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

_FAR_BATCHES = (4, 64, 4096)
"""Nodes of the grid beyond the largest profiled batch, as multiples of it. Beyond the last one,
which no engine reaches, times stay constant."""
_FAR_CONTEXTS = (8, 1_000_000)
"""Nodes beyond the largest profiled total of contexts (tokens of all requests), as multiples."""
_MOST_DRAFTS_SHARE = 0.95
"""Largest share of a step's time that drafts are taken to add, so that the rest is above 0."""


class Surface:
    """Interpolates values on a grid; beyond its last nodes it stays constant.

    Args:
        busy, batch, context: the nodes, ascending: replicas that work at once, requests of the
            replica, tokens of their contexts. Batch and context start at 0.
        values: float64 [series, busy, batch, context]; a series is a kind of step
            (`_DraftSeries`), and nothing is interpolated between two of them.
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

    def at(self, batch: float, context: float, busy: float, series: int = 0) -> float:
        """The value at one point, in a few microseconds."""
        x, y = min(batch, self._last[0]), min(context, self._last[1])
        columns, rows = self._inner
        cell = bisect_right(columns, x) * (len(rows) + 1) + bisect_right(rows, y)
        nodes = self._busy
        below = max(bisect_right(nodes, busy) - 1, 0)
        cell += (series * len(nodes) + below) * self._count
        value: float = _polynomial(self._points[cell], x, y)
        if busy <= nodes[below] or below + 1 == len(nodes):
            return value
        weight = (busy - nodes[below]) / (nodes[below + 1] - nodes[below])
        return value + weight * (_polynomial(self._points[cell + self._count], x, y) - value)

    def many(self, batch: Any, context: Any, busy: Any, series: Any = 0) -> Floats:
        """The values at points; arrays or numbers, which broadcast."""
        x, y = np.minimum(batch, self._last[0]), np.minimum(context, self._last[1])
        cell = self._inner_batch.searchsorted(x, "right") * (len(self._inner_context) + 1)
        cell = cell + self._inner_context.searchsorted(y, "right")
        position = np.interp(busy, self._busy, np.arange(len(self._busy)))
        below = np.floor(position).astype(np.intp)
        cell = cell + (series * len(self._busy) + below) * self._count
        value: Floats = _polynomial(self._cells.take(cell, axis=1), x, y)
        if len(self._busy) == 1:
            return value
        last = below + 1 == len(self._busy)
        above = _polynomial(self._cells.take(cell + ~last * self._count, axis=1), x, y)
        return value + (position - below) * (above - value)


def _polynomial(cell: Any, x: Any, y: Any) -> Any:
    """Value of a cell's bilinear polynomial at (x, y), for one cell or for arrays of them."""
    x0, y0, value, along_x, along_y, twist = cell
    dx = x - x0
    dy = y - y0
    return value + along_x * dx + (along_y + twist * dx) * dy


@dataclass(frozen=True)
class _DraftSeries:
    """Which series of a layout's grid tell the steps of a draft length k, int64 [largest k + 1].

    Beside the steps without drafts, each profiled k has two series: steps that have no draft to
    verify though they look for k, and steps in which every request verifies k. A k that was not
    profiled takes those of the nearest one.

    Attributes:
        unverified: index of the first of the two; 0, the steps without drafts, for k = 0.
        verified: index of the second.
        per_request: drafts that each request verifies in the second.
    """

    unverified: Ints
    verified: Ints
    per_request: Ints

    @classmethod
    def of(cls, profiled: Sequence[int]) -> _DraftSeries:
        """The series of a grid that has those of `_steps_of_series(profiled)`."""
        lengths = np.array(profiled)
        nearest = abs(np.arange(lengths[-1] + 1)[:, None] - lengths).argmin(axis=1)
        unverified = 1 + 2 * nearest
        unverified[0] = 0
        return cls(unverified, 2 + 2 * nearest, lengths[nearest])


def _steps_of_series(profiled: Sequence[int]) -> Ints:
    """The draft length k of each series, and the drafts that each request verifies, int64
    [series, 2]. `profiled` are the draft lengths above 0, ascending."""
    return np.array([(0, 0), *((k, verified) for k in profiled for verified in (0, k))])


@dataclass(frozen=True)
class _LayoutModel:
    """The model of one layout, uncorrected.

    Attributes:
        base: the roofline, which adds what prefill and the longest context take.
        grid: seconds of decode steps.
        series: which of the grid's series tell a draft length.
    """

    base: StepBase
    grid: Surface
    series: _DraftSeries

    def at(self, shape: StepShape) -> float:
        """Seconds of one decode step, with what its longest context adds."""
        of_k = min(shape.k, len(self.series.verified) - 1)
        point = shape.batch, shape.context, shape.busy
        seconds = self.grid.at(*point, int(self.series.unverified[of_k]))
        if shape.drafts:
            verified = self.grid.at(*point, int(self.series.verified[of_k]))
            most = int(self.series.per_request[of_k]) * shape.batch
            seconds += (verified - seconds) * shape.drafts / most
        return seconds + self.base.longest * shape.longest

    def many(self, batch: Any, context: Any, busy: Any, drafts: Any, k: Any) -> Floats:
        """Seconds of decode steps, but for what their longest contexts add."""
        of_k = np.minimum(k, len(self.series.verified) - 1)
        seconds: Floats = self.grid.many(batch, context, busy, self.series.unverified[of_k])
        if not np.any(drafts):
            return seconds
        verified = self.grid.many(batch, context, busy, self.series.verified[of_k])
        most = self.series.per_request[of_k] * np.maximum(batch, 1e-9)
        return seconds + (verified - seconds) * (drafts / most)


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
        engine = profile.chosen, profile.drafter_has_weights
        bases = {layout: StepBase.fit(steps, *engine) for layout, steps in samples.items()}
        decodes = by_layout(profile.steps, decodes=True)
        fits = cross_validate(profile.steps, *engine)
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
            share = np.clip(1 - plain / predicted, 0.0, _MOST_DRAFTS_SHARE)
        return np.asarray(predicted * self._correction.factor(layout, np.asarray(batch), share))

    def step(self, layout: Layout, shape: StepShape) -> float:
        """Seconds of one step, as `seconds` gives them."""
        return float(self.seconds(layout, *astuple(shape)))

    def observe(self, layout: Layout, shape: StepShape, seconds: float) -> float | None:
        """Learn from a real step.

        Steps with prefill are left out: their time depends on how the prompts are cut, and they
        are few. So are steps with drafts where the profile has none.

        Returns:
            The seconds that were predicted before; None if the step is left out.
        """
        if shape.prefill or not shape.batch:
            return None
        model = self._models[layout]
        if (shape.drafts or shape.k) and not model.base.has_drafts:
            return None
        predicted, drafts = model.at(shape), 0.0
        if shape.k:
            plain = model.at(replace(shape, drafts=0, k=0))
            drafts = min(max(1 - plain / predicted, 0.0), _MOST_DRAFTS_SHARE)
        ratio = seconds / predicted
        return predicted * self._correction.observe(layout, shape.batch, ratio, drafts)

    @property
    def correction_version(self) -> int:
        """Grows whenever a correction has changed by more than ~3 % since it last did."""
        return self._correction.version


def _compile(
    layout: Layout, base: StepBase, decodes: Sequence[StepSample], booster: Any
) -> _LayoutModel:
    """Evaluate a layout's base, and its residual where it has one, on a grid.

    Args:
        decodes: the profile's decode steps in the layout.
        booster: what `fit_residual` gave; None: the layout has no residual.
    """
    batches = [sample.batch for sample in decodes]
    contexts = [max(sample.context, 1) for sample in decodes]
    # If no sample has drafts, there are series for k = 1, whose times are the base's.
    profiled = sorted({sample.k for sample in decodes} - {0}) or [1]
    if base.has_passes:  # each takes another pass
        profiled = list(range(1, profiled[-1] + 1))
    steps = _steps_of_series(profiled)
    busy_nodes = sorted({1, layout.replicas, *(sample.busy for sample in decodes)})
    batch_nodes = _nodes(batches, _FAR_BATCHES, 0, KNEES)
    context_nodes = _nodes(contexts, _FAR_CONTEXTS, min(contexts))

    # Each [series, busy, batch, context].
    series, busy, batch, context = np.meshgrid(
        np.arange(len(steps)),
        np.array(busy_nodes, float),
        batch_nodes,
        context_nodes,
        indexing="ij",
    )
    k, verified = np.moveaxis(steps[series], -1, 0)
    seconds = of_base(base, batch, context, busy, verified * batch, k)
    if booster is not None:
        # Beyond the samples the residual stays as it is at their edge.
        means = [total / size for total, size in zip(contexts, batches, strict=True)]
        inside = np.clip(batch, min(batches), max(batches))
        mean = np.clip(context / inside, min(means), max(means))
        features = features_of(layout, inside, mean, 1.0, busy, verified, k)
        seconds = seconds * factors(booster, features).reshape(seconds.shape)
    grid = Surface(busy_nodes, batch_nodes, context_nodes, seconds)
    return _LayoutModel(base, grid, _DraftSeries.of(profiled))


def _nodes(
    profiled: Collection[int], far: Sequence[int], least: int, more: Sequence[int] = ()
) -> Floats:
    """The nodes of an axis of the grid, ascending: 0, the profiled values, and `more`.

    Args:
        far: multiples of the largest profiled value, which are nodes, too.
        least: powers of two above this, up to the largest profiled value, are nodes, too.
    """
    largest = max(profiled)
    powers = [1 << i for i in range(largest.bit_length()) if 1 << i > least]
    every = {0, *profiled, *powers, *more, *(largest * factor for factor in far)}
    return np.array(sorted(every), np.float64)

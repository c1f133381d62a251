"""How long a step of one replica takes. Pure.

A linear roofline (`step_base`) carries the shape of the curve, LightGBM its residual in the layouts
where cross-validation finds that it helps (`step_residual`). Both are evaluated once, on a grid
(`step_grid`); from then on the model interpolates, in microseconds, and real steps correct it
(`correction`). Outside the profiled range it follows the base. What prefill and the longest context
add comes from the base alone.

Each draft length has two grids: steps with no draft to verify and with as many as it makes. Between
them times are linear in the drafts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pat_vllm.layout import Layout
from pat_vllm.predictor.correction import OnlineCorrection
from pat_vllm.predictor.state import Floats, Ints
from pat_vllm.predictor.step_base import StepBase
from pat_vllm.predictor.step_grid import Surface, batch_nodes, context_nodes
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
from pat_vllm.profiling.profile import Profile, StepSample, StepShape


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
        """Seconds of one step."""
        prefill, busy = shape.prefill, shape.busy
        # Prompts are computed beside the drafts.
        tokens = shape.batch + shape.drafts
        extra: float = self.base.extra(tokens, shape.longest, prefill, busy)
        none, every, drafts = self.kinds[:, min(shape.k, self.kinds.shape[1] - 1)].tolist()
        seconds = self.grid.at(shape.batch, shape.context, busy, none)
        if shape.drafts:
            found = self.grid.at(shape.batch, shape.context, busy, every)
            seconds += (found - seconds) * shape.drafts / (drafts * shape.batch)
        return seconds + extra

    def many(self, batch: Any, context: Any, busy: Any, drafts: Any, k: Any) -> Floats:
        """Seconds of decode steps, but for what their longest contexts add."""
        none, every, of_request = self.kinds[:, np.minimum(k, self.kinds.shape[1] - 1)]
        seconds: Floats = self.grid.many(batch, context, busy, none)
        if not np.any(drafts):
            return seconds
        found = self.grid.many(batch, context, busy, every)
        return seconds + (found - seconds) * (drafts / (of_request * np.maximum(batch, 1e-9)))


class StepTimeModel:
    """Predicts the seconds of a step. Made by `fit`. Not thread-safe.

    Attributes:
        fits: by layout, what the profile led to.
    """

    def __init__(self, models: dict[Layout, _LayoutModel], fits: Mapping[Layout, StepFit]) -> None:
        self.fits = fits
        self._models = models
        self._correction = OnlineCorrection(models)

    @property
    def layouts(self) -> Collection[Layout]:
        """Those of which it predicts steps."""
        return self._models.keys()

    @classmethod
    def fit(cls, profile: Profile) -> StepTimeModel:
        """Learn from a profile."""
        samples = by_layout(profile.steps)
        bases = {one: StepBase.fit(some, profile.chosen) for one, some in samples.items()}
        decodes = by_layout(profile.steps, decodes=True)
        fits = cross_validate(profile.steps, profile.chosen)
        learned = any(fit.learned for fit in fits.values())
        booster = fit_residual(bases, learnable(decodes)) if learned else None
        models = {
            one: _compile(one, bases[one], some, booster if fits[one].learned else None)
            for one, some in decodes.items()
        }
        return cls(models, {one: fits[one] for one in models})

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
            one if isinstance(one, int) else np.asarray(one, np.float64)
            for one in (batch, context, longest, prefill, busy, drafts)
        )
        plain = model.many(batch, context, busy, drafts, k)
        plain = plain + model.base.extra(batch, longest, prefill, busy)
        return np.asarray(plain * self._correction.factors(layout, np.asarray(batch)))

    def step(self, layout: Layout, shape: StepShape) -> float:
        """Seconds of one step, as `seconds` gives them."""
        return self._plain(layout, shape) * self._correction.factor(layout, shape.batch)

    def _plain(self, layout: Layout, shape: StepShape) -> float:
        """Without the online correction."""
        return self._models[layout].at(shape)

    def observe(self, layout: Layout, shape: StepShape, seconds: float) -> None:
        """Learn from a real step.

        Steps with prefill are left out: their time depends on how the prompts are cut, and they
        are few.
        """
        if not self.comparable(layout, shape) or not seconds > 0:
            return
        self._correction.observe(layout, shape.batch, seconds / self._plain(layout, shape))

    def comparable(self, layout: Layout, shape: StepShape) -> bool:
        """Whether the profile has steps of this kind, and a real one can be compared with them."""
        if shape.prefill or not shape.batch:
            return False
        return not (shape.drafts or shape.k) or self._models[layout].base.has_drafts

    def correction(self, layout: Layout, batch: float) -> float:
        """Real over profiled time of a decode step, as learned so far."""
        return self._correction.factor(layout, batch)

    @property
    def correction_version(self) -> int:
        """Grows whenever a correction has changed by more than ~3 % since it last did."""
        return self._correction.version


def _compile(
    layout: Layout, base: StepBase, decodes: Sequence[StepSample], booster: Any
) -> _LayoutModel:
    """Evaluate base and residual on a grid."""
    sizes = [s.batch for s in decodes]
    means = [max(s.context, 1) / s.batch for s in decodes]
    busy = sorted({1, layout.replicas, *(s.busy for s in decodes)})
    batch = np.array(batch_nodes(sizes))
    context = np.array(context_nodes(s.context for s in decodes))
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
    return _LayoutModel(base, Surface(busy, batch.tolist(), context.tolist(), values), of_length)

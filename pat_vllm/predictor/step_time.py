"""How long a step of one replica takes. Pure.

A linear roofline (`step_base`) carries the shape of the curve, LightGBM its residual. Both are
evaluated once, on a grid (`step_grid`); from then on the model interpolates, in microseconds, and
real steps correct it (`correction`). Outside the profiled range it follows the base. What prefill
and the longest context add comes from the base alone.

Each draft length has two grids: steps with no draft to verify and with as many as it makes. Between
them times are linear in the drafts.
"""

from __future__ import annotations

from collections import defaultdict
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
from pat_vllm.profiling.profile import Profile, StepSample, StepShape

LEAST_SAMPLES = 8
"""Decode samples of a layout from which on its residual is learned."""

_ROUNDS = 80
_LIGHTGBM = {
    "objective": "l2",
    "learning_rate": 0.1,
    "max_depth": 3,
    "num_leaves": 8,
    "min_data_in_leaf": 4,
    "min_data_in_bin": 1,
    "lambda_l2": 1.0,
    "feature_pre_filter": False,
    "num_threads": 1,
    "deterministic": True,
    "force_row_wise": True,
    "seed": 0,
    "verbosity": -1,
}
"""Small trees: a profile has tens to hundreds of samples, with about 2 % of noise."""

_LEAST_SHARE = 0.1
"""What is left of a sample, at least, for the grid when the base's share for the longest context
is taken off."""


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
    """Predicts the seconds of a step. Made by `fit`. Not thread-safe."""

    def __init__(self, models: dict[Layout, _LayoutModel]) -> None:
        self._models = models
        self._correction = OnlineCorrection(models)

    @property
    def layouts(self) -> Collection[Layout]:
        """Those of which it predicts steps."""
        return self._models.keys()

    @classmethod
    def fit(cls, profile: Profile) -> StepTimeModel:
        """Learn from a profile."""
        samples: defaultdict[Layout, list[StepSample]] = defaultdict(list)
        for sample in profile.steps:
            samples[sample.layout].append(sample)
        bases = {one: StepBase.fit(samples[one], profile.chosen) for one in sorted(samples)}
        decodes = {one: [s for s in samples[one] if _is_decode(s)] for one in bases}
        learnable = {one: some for one, some in decodes.items() if len(some) >= LEAST_SAMPLES}
        booster = _fit_residual(bases, learnable) if learnable else None
        return cls(
            {
                one: _compile(one, bases[one], some, booster if one in learnable else None)
                for one, some in decodes.items()
                if some
            }
        )

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


def _is_decode(sample: StepSample) -> bool:
    return sample.batch > 0 and not sample.prefill


def _features(
    layout: Layout,
    batch: ArrayLike,
    mean: ArrayLike,
    skew: ArrayLike,
    busy: ArrayLike,
    each: ArrayLike,
    k: ArrayLike,
) -> Floats:
    """What LightGBM sees, float64 [n, 10]; `mean` context per request, `skew` longest / mean,
    `each` drafts per request."""
    batch, mean, skew, busy, each, k = np.broadcast_arrays(batch, mean, skew, busy, each, k)
    tokens = batch * (1 + each)
    tp, spread = (np.full(batch.size, one) for one in (layout.tp, layout.experts == "ep"))
    columns = [tp, batch, mean, batch * mean, skew, busy, each, k, tokens, spread]
    return np.column_stack([np.ravel(column) for column in columns]).astype(np.float64)


def _fit_residual(
    bases: Mapping[Layout, StepBase], learnable: Mapping[Layout, Sequence[StepSample]]
) -> Any:
    """LightGBM on log(seconds / base) of decode samples, by layout."""
    features, targets = [], []
    for layout, decodes in learnable.items():
        base = bases[layout]
        batch, context, longest, busy, drafts, k, seconds = np.array(
            [(s.batch, s.context, s.longest, s.busy, s.drafts, s.k, s.seconds) for s in decodes],
            float,
        ).T
        mean = np.maximum(context, 1.0) / batch
        features.append(_features(layout, batch, mean, longest / mean, busy, drafts / batch, k))
        rest = np.maximum(seconds - base.extra(batch, longest, 0, busy), _LEAST_SHARE * seconds)
        targets.append(np.log(rest / _of_base(base, batch, context, busy, drafts, k)))
    import lightgbm

    data = lightgbm.Dataset(np.vstack(features), np.concatenate(targets))
    return lightgbm.train(_LIGHTGBM, data, num_boost_round=_ROUNDS)


def _of_base(base: StepBase, batch: Any, context: Any, busy: Any, drafts: Any, k: Any) -> Any:
    """Seconds of decode steps by the base, without what their longest contexts add."""
    return base.decode(batch, context, busy) + base.extra(batch, 0.0, 0, busy, drafts, k)


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
    values = _of_base(base, axes[2], axes[3], axes[1], each * axes[2], k)
    inside = np.minimum(np.maximum(axes[2], min(sizes)), max(sizes))
    if booster is not None:
        # Beyond the samples the residual stays as it is at their edge.
        mean = np.minimum(np.maximum(axes[3] / inside, min(means)), max(means))
        features = _features(layout, inside, mean, 1.0, axes[1], each, k)
        residual = booster.predict(features, num_threads=1)
        values = values * np.exp(residual).reshape(values.shape)
    every = np.arange(lengths[-1] + 1)
    nearest = abs(every[:, None] - np.array(lengths)).argmin(axis=1)
    of_length = np.array([1 + 2 * nearest, 2 + 2 * nearest, np.array(lengths)[nearest]])
    of_length[0, 0] = 0
    return _LayoutModel(base, Surface(busy, batch.tolist(), context.tolist(), values), of_length)

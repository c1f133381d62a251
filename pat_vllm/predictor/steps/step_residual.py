"""What LightGBM learns of step times that the roofline (`step_base`) misses, and where. Pure.

It is used in a layout whose held-out steps it predicts better. In the others the roofline
stands alone: a profile has tens of noisy samples, and its noise is learnt as easily as its shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pat_vllm.layout import Layout
from pat_vllm.predictor.state import Floats
from pat_vllm.predictor.steps.step_base import StepBase
from pat_vllm.profile import StepSample

LEAST_SAMPLES = 8
"""Decode samples of a layout from which on its residual is learned."""
_FOLDS = 3

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
"""What is left of a sample, at least, for the residual when the base's share for the longest
context is taken off."""


@dataclass(frozen=True)
class StepFit:
    """How a layout's steps are predicted.

    Attributes:
        roofline, with_residual: relative errors of decode steps that were held out, by the roofline
            alone and with the residual; none where too few steps are profiled.
    """

    roofline: tuple[float, ...] = ()
    with_residual: tuple[float, ...] = ()

    @property
    def learned(self) -> bool:
        """Whether the residual is used."""
        return sum(self.with_residual) < sum(self.roofline)


def by_layout(steps: Iterable[StepSample], decodes: bool = False) -> dict[Layout, list[StepSample]]:
    """Samples of each layout, in order; of all steps, or of those that only decode."""
    samples: defaultdict[Layout, list[StepSample]] = defaultdict(list)
    for s in steps:
        if not decodes or (s.batch and not s.prefill):
            samples[s.layout].append(s)
    return {layout: samples[layout] for layout in sorted(samples)}


def folds(
    steps: Sequence[StepSample], count: int, seed: int
) -> Iterator[tuple[list[StepSample], list[StepSample]]]:
    """Samples that are held out, and the others: `count` times.

    All samples of a shape are held out together, for a repeated measurement of a shape that was
    learned says nothing. Folds are random over each layout's shapes.
    """
    rng = np.random.default_rng(seed)
    parts: list[list[StepSample]] = [[] for _ in range(count)]
    for samples in by_layout(steps).values():
        shapes: defaultdict[tuple[int, ...], list[StepSample]] = defaultdict(list)
        for s in samples:
            shapes[s.batch, s.context, s.prefill, s.busy, s.drafts, s.k].append(s)
        for position, repeats in zip(rng.permutation(len(shapes)), shapes.values(), strict=True):
            parts[position % count] += repeats
    for held in parts:
        yield held, [s for part in parts if part is not held for s in part]


def cross_validate(
    steps: Sequence[StepSample], chosen: float, has_passes: bool = False, seed: int = 0
) -> dict[Layout, StepFit]:
    """Errors of steps that neither the roofline nor its residual has seen, by layout."""
    errors: defaultdict[Layout, list[Floats]] = defaultdict(list)
    for held, kept in folds(steps, _FOLDS, seed):
        bases = {
            layout: StepBase.fit(samples, chosen, has_passes)
            for layout, samples in by_layout(kept).items()
        }
        decodes = learnable(by_layout(kept, decodes=True))
        booster = fit_residual(bases, decodes) if decodes else None
        for layout, samples in by_layout(held, decodes=True).items():
            if layout in decodes:
                features, extra, rest, seconds = _parts(bases[layout], layout, samples)
                both = np.array([rest, rest * factors(booster, features)])
                errors[layout].append(np.abs((both + extra) / seconds - 1))
    joined = {layout: map(tuple, np.hstack(parts).tolist()) for layout, parts in errors.items()}
    return {layout: StepFit(*joined.get(layout, ())) for layout in by_layout(steps)}


def learnable(decodes: Mapping[Layout, list[StepSample]]) -> dict[Layout, list[StepSample]]:
    """The layouts that have samples enough."""
    return {layout: samples for layout, samples in decodes.items() if len(samples) >= LEAST_SAMPLES}


def fit_residual(
    bases: Mapping[Layout, StepBase], decodes: Mapping[Layout, Sequence[StepSample]]
) -> Any:
    """LightGBM on log(seconds / base) of decode samples, of all layouts together."""
    import lightgbm

    features, targets = [], []
    for layout, samples in decodes.items():
        columns, extra, rest, seconds = _parts(bases[layout], layout, samples)
        features.append(columns)
        targets.append(np.log(np.maximum(seconds - extra, _LEAST_SHARE * seconds) / rest))
    data = lightgbm.Dataset(np.vstack(features), np.concatenate(targets))
    return lightgbm.train(_LIGHTGBM, data, _ROUNDS, keep_training_booster=True)


def factors(booster: Any, features: Floats) -> Floats:
    """Seconds over those of the base, without what longest contexts add, float64 [n]."""
    return np.exp(booster.predict(features, num_threads=1))


def features_of(
    layout: Layout,
    batch: ArrayLike,
    mean: ArrayLike,
    skew: ArrayLike,
    busy: ArrayLike,
    each: ArrayLike,
    k: ArrayLike,
) -> Floats:
    """What LightGBM sees, float64 [n, 9]; `mean` context per request, `skew` longest / mean,
    `each` drafts per request."""
    batch, mean, skew, busy, each, k = np.broadcast_arrays(batch, mean, skew, busy, each, k)
    tokens = batch * (1 + each)
    tp = np.full(batch.size, layout.tp)
    columns = [tp, batch, mean, batch * mean, skew, busy, each, k, tokens]
    return np.column_stack([np.ravel(column) for column in columns]).astype(np.float64)


def of_base(base: StepBase, batch: Any, context: Any, busy: Any, drafts: Any, k: Any) -> Any:
    """Seconds of decode steps by the base, without what their longest contexts add."""
    verified = base.decode(batch, context, busy) + base.extra(batch, 0.0, 0, busy, drafts)
    return verified + base.making_drafts(batch, context, k)


def _parts(
    base: StepBase, layout: Layout, decodes: Sequence[StepSample]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Features; seconds that the longest contexts add; the rest by the base; seconds measured."""
    batch, context, longest, busy, drafts, k, seconds = np.array(
        [(s.batch, s.context, s.longest, s.busy, s.drafts, s.k, s.seconds) for s in decodes], float
    ).T
    mean = np.maximum(context, 1.0) / batch
    features = features_of(layout, batch, mean, longest / mean, busy, drafts / batch, k)
    extra = base.extra(batch, longest, 0, busy)
    return features, extra, of_base(base, batch, context, busy, drafts, k), seconds

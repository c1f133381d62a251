"""How long a step of one replica takes. Pure.

A linear roofline (`step_base`) carries the shape of the curve, LightGBM its residual. Both are
evaluated once, on a grid that is made monotone (`step_grid`); from then on the model interpolates,
in microseconds, and real steps correct it (`correction`). Outside the profiled range it follows
the base. What prefill and the longest context add comes from the base alone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pat_vllm.predictor.correction import OnlineCorrection
from pat_vllm.predictor.state import Floats
from pat_vllm.predictor.step_base import StepBase
from pat_vllm.predictor.step_grid import Surface, batch_nodes, context_nodes, monotone
from pat_vllm.profiling.profile import Profile, StepSample, StepShape

FORMAT = 1
"""Version of the JSON format."""

LEAST_SAMPLES = 8
"""Decode samples of a tensor-parallel size from which on its residual is learned."""

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

_SLACK = 1.5
"""Contexts per request within this factor of the profiled ones count as supported by samples."""

_REFRESH = 16
"""Observations after which it is checked whether the corrected grid is still good; `version`
asks for that, too."""

_STALE = 0.005
"""Relative change of a correction from which on the corrected grid is made anew."""


class _SizeModel:
    """The compiled model of one tensor-parallel size.

    `values` and `supported` are the uncorrected grid, [busy, batch, context] and [batch, context].
    """

    def __init__(
        self,
        base: StepBase,
        busy: Sequence[float],
        batch: Sequence[float],
        context: Sequence[float],
        values: Floats,
        supported: NDArray[np.bool_],
    ) -> None:
        self.base = base
        self.busy, self.batch, self.context = list(busy), list(batch), list(context)
        self.values = values
        self.supported = supported
        self.plain = Surface(busy, batch, context, values)
        self.corrected = self.plain
        self.factor = 1.0
        """Correction of what is not on the grid."""
        self.factors = np.ones(len(self.batch))
        """Corrections that `corrected` holds, by batch node."""
        self.seen = (0, 0)
        """Version and observations of the correction when it was last compared."""

    def correct(self, tp: int, correction: OnlineCorrection, stale: float = _STALE) -> None:
        """Apply the corrections to the grid, and make it monotone again, if they have changed."""
        self.seen = (correction.version, correction.observed)
        factors = np.array([correction.factor(tp, node) for node in self.batch])
        if abs(factors - self.factors).max() > stale * self.factors.min():
            self.factors = factors
            self.factor = correction.factor(tp)
            values = monotone(self.values * factors[None, :, None], self.supported)
            self.corrected = self.plain.with_values(values)

    def to_json(self) -> dict[str, Any]:
        return {
            "base": self.base.to_json(),
            "busy": self.busy,
            "batch": self.batch,
            "context": self.context,
            "values": self.values.tolist(),
            "supported": self.supported.tolist(),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> _SizeModel:
        return cls(
            StepBase.from_json(content["base"]),
            content["busy"],
            content["batch"],
            content["context"],
            np.array(content["values"], np.float64),
            np.array(content["supported"], np.bool_),
        )


class StepTimeModel:
    """Predicts the seconds of a step: non-decreasing in batch, context, longest, prefill and busy.

    Made by `fit` or `load`. Not thread-safe.
    """

    def __init__(
        self, sizes: dict[int, _SizeModel], booster: str | None, correction: OnlineCorrection
    ) -> None:
        self._sizes = sizes
        self._booster = booster
        self._correction = correction

    @classmethod
    def fit(cls, profile: Profile, residual: bool = True) -> StepTimeModel:
        """Learn from a profile; `residual` False leaves the linear base alone."""
        return cls._fit(profile.steps, profile.ranks, residual)

    @classmethod
    def _fit(cls, steps: Sequence[StepSample], ranks: int, residual: bool) -> StepTimeModel:
        by_tp: defaultdict[int, list[StepSample]] = defaultdict(list)
        for sample in steps:
            by_tp[sample.tp].append(sample)
        bases = {tp: StepBase.fit(samples) for tp, samples in sorted(by_tp.items())}
        booster = None
        if residual:
            learnable = [
                (bases[tp], samples)
                for tp, samples in sorted(by_tp.items())
                if sum(map(_is_decode, samples)) >= LEAST_SAMPLES
            ]
            booster = _fit_residual(learnable)
        sizes = {}
        for tp, base in bases.items():
            decodes = [sample for sample in by_tp[tp] if _is_decode(sample)]
            if not decodes:
                continue
            knows = booster if len(decodes) >= LEAST_SAMPLES else None
            sizes[tp] = _compile(tp, base, decodes, max(1, ranks // tp), knows)
        text = booster.model_to_string() if booster is not None else None
        return cls(sizes, text, OnlineCorrection())

    def seconds(
        self,
        tp: int,
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
            KeyError: `tp` is no layout of the profile.
        """
        size = self._current(tp)
        batch, context = np.asarray(batch, np.float64), np.asarray(context, np.float64)
        longest = np.asarray(longest, np.float64)
        if not isinstance(prefill, int):
            prefill = np.asarray(prefill, np.float64)
        if not isinstance(busy, (int, float)):
            busy = np.asarray(busy, np.float64)
        if not isinstance(drafts, int):
            drafts = np.asarray(drafts, np.float64)
        if not isinstance(k, int):
            k = np.asarray(k)
        extra = size.base.extra(batch, longest, prefill, busy, drafts, k)
        return np.asarray(size.corrected.many(batch, context, busy) + size.factor * extra)

    def step(self, tp: int, shape: StepShape) -> float:
        """Seconds of one step, as `seconds` gives them."""
        size = self._current(tp)
        extra = size.base.extra(
            shape.batch, shape.longest, shape.prefill, shape.busy, shape.drafts, shape.k
        )
        return size.corrected.at(shape.batch, shape.context, shape.busy) + size.factor * extra

    def observe(self, tp: int, shape: StepShape, seconds: float) -> None:
        """Learn from a real step.

        Steps with prefill are left out: their time depends on how the prompts are cut, and they
        are few.
        """
        if not self.comparable(tp, shape) or not seconds > 0:
            return
        size = self._sizes[tp]
        predicted = size.plain.at(shape.batch, shape.context, shape.busy)
        predicted += size.base.extra(
            shape.batch, shape.longest, 0, shape.busy, shape.drafts, shape.k
        )
        self._correction.observe(tp, shape.batch, seconds / predicted)

    def comparable(self, tp: int, shape: StepShape) -> bool:
        """Whether the profile has steps of this kind, and a real one can be compared with them."""
        if shape.prefill or not shape.batch:
            return False
        return not (shape.drafts or shape.k) or self._sizes[tp].base.has_drafts

    def evidence(self, tp: int, batch: float) -> float:
        """Recent real steps near this batch size, at most ~50; 0 where none was seen."""
        return self._correction.evidence(tp, batch)

    def correction(self, tp: int, batch: float) -> float:
        """Real over profiled time of a decode step, as learned so far."""
        return self._correction.factor(tp, batch)

    @property
    def correction_version(self) -> int:
        """Grows whenever a correction has changed by more than ~3 % since it last did."""
        return self._correction.version

    def _current(self, tp: int) -> _SizeModel:
        """The model of a size, its grid corrected by what was observed until lately."""
        size = self._sizes[tp]
        version, observed = size.seen
        correction = self._correction
        if correction.version != version or correction.observed - observed >= _REFRESH:
            size.correct(tp, correction)
        return size

    def to_json(self) -> dict[str, Any]:
        """As plain values, the online correction included."""
        # What is read back has the newest corrections; so must this one, to be its equal.
        for tp, size in self._sizes.items():
            size.correct(tp, self._correction, stale=0.0)
        return {
            "format": FORMAT,
            "sizes": {str(tp): size.to_json() for tp, size in self._sizes.items()},
            "booster": self._booster,
            "correction": self._correction.to_json(),
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> StepTimeModel:
        """From what `to_json` gave.

        Raises:
            ValueError: it is of another format.
        """
        if content.get("format") != FORMAT:
            raise ValueError(
                f"step-time model has format {content.get('format')!r}, this version reads "
                f"{FORMAT}; fit it again from its profile"
            )
        sizes = {int(tp): _SizeModel.from_json(size) for tp, size in content["sizes"].items()}
        model = cls(sizes, content["booster"], OnlineCorrection.from_json(content["correction"]))
        for tp, size in sizes.items():
            size.correct(tp, model._correction, stale=0.0)
        return model

    def save(self, path: Path) -> None:
        """Write a JSON file."""
        path.write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: Path) -> StepTimeModel:
        """Read a JSON file; errors as of `from_json`."""
        return cls.from_json(json.loads(path.read_text()))


def _is_decode(sample: StepSample) -> bool:
    return sample.batch > 0 and not (sample.prefill or sample.drafts or sample.k)


def _features(
    tp: int, batch: ArrayLike, mean: ArrayLike, skew: ArrayLike, busy: ArrayLike
) -> Floats:
    """What LightGBM sees, float64 [n, 6]; `mean` context per request, `skew` longest / mean."""
    batch, mean, skew, busy = np.broadcast_arrays(batch, mean, skew, busy)
    columns = [np.full(batch.size, tp), batch, mean, batch * mean, skew, busy]
    return np.column_stack([np.ravel(column) for column in columns]).astype(np.float64)


def _fit_residual(learnable: Sequence[tuple[StepBase, list[StepSample]]]) -> Any:
    """LightGBM on log(seconds / base) of the decode samples; None where there are none."""
    features, targets = [], []
    for base, samples in learnable:
        decodes = [sample for sample in samples if _is_decode(sample)]
        batch, context, longest, busy, seconds = np.array(
            [(s.batch, s.context, s.longest, s.busy, s.seconds) for s in decodes], float
        ).T
        mean = np.maximum(context, 1.0) / batch
        features.append(_features(decodes[0].tp, batch, mean, longest / mean, busy))
        rest = np.maximum(seconds - base.extra(batch, longest, 0, busy), _LEAST_SHARE * seconds)
        targets.append(np.log(rest / base.decode(batch, context, busy)))
    if not features:
        return None
    import lightgbm

    data = lightgbm.Dataset(np.vstack(features), np.concatenate(targets))
    return lightgbm.train(_LIGHTGBM, data, num_boost_round=_ROUNDS)


def _compile(
    tp: int, base: StepBase, decodes: Sequence[StepSample], replicas: int, booster: Any
) -> _SizeModel:
    """Evaluate base and residual on a grid and make it monotone."""
    sizes = [s.batch for s in decodes]
    means = [max(s.context, 1) / s.batch for s in decodes]
    busy = sorted({1, replicas, *(s.busy for s in decodes)})
    batch = np.array(batch_nodes(sizes))
    context = np.array(context_nodes(s.context for s in decodes))
    axes = np.meshgrid(np.array(busy, float), batch, context, indexing="ij")
    values = base.decode(axes[1], axes[2], axes[0])
    inside = np.minimum(np.maximum(axes[1], min(sizes)), max(sizes))
    if booster is not None:
        # Beyond the samples the residual stays as it is at their edge.
        mean = np.minimum(np.maximum(axes[2] / inside, min(means)), max(means))
        residual = booster.predict(_features(tp, inside, mean, 1.0, axes[0]), num_threads=1)
        values = values * np.exp(residual).reshape(values.shape)
    mean = axes[2][0] / inside[0]
    near = (mean >= min(means) / _SLACK) & (mean <= max(means) * _SLACK)
    supported = near & (inside[0] == axes[1][0])
    values = monotone(values, supported)
    return _SizeModel(
        base, [float(b) for b in busy], batch.tolist(), context.tolist(), values, supported
    )


@dataclass(frozen=True)
class HeldOut:
    """Relative errors of predictions of steps that the model had not seen; fractions.

    Attributes:
        mean: mean absolute error.
        p90: 90 % of the errors are at most this.
        worst: the largest.
        count: number of predicted samples.
    """

    mean: float
    p90: float
    worst: float
    count: int


def held_out_error(
    profile: Profile,
    folds: int = 5,
    seed: int = 0,
    *,
    residual: bool = True,
    prefill: bool = False,
) -> dict[int, HeldOut]:
    """K-fold error by tensor-parallel size; one that has too few shapes is left out.

    Counts decode steps, which are nearly all of a rollout's, or with `prefill` the steps that
    have some.

    All samples of a shape are held out together, for a repeated measurement of a shape that was
    learned says nothing. Folds are random over each size's shapes.
    """
    by_tp: defaultdict[int, defaultdict[tuple[int, ...], list[StepSample]]]
    by_tp = defaultdict(lambda: defaultdict(list))
    for s in profile.steps:
        by_tp[s.tp][(s.batch, s.context, s.prefill, s.busy, s.drafts, s.k)].append(s)
    rng = np.random.default_rng(seed)
    parts: list[list[StepSample]] = [[] for _ in range(max(2, folds))]
    for _, shapes in sorted(by_tp.items()):
        order = rng.permutation(len(shapes))
        for position, samples in zip(order, shapes.values(), strict=True):
            parts[position % len(parts)] += samples
    errors: defaultdict[int, list[float]] = defaultdict(list)
    for held in parts:
        kept = [s for part in parts if part is not held for s in part]
        model = StepTimeModel._fit(kept, profile.ranks, residual)
        for s in held:
            if s.tp in model._sizes and prefill == (s.prefill > 0):
                errors[s.tp].append(abs(model.step(s.tp, s.shape) / s.seconds - 1))
    return {
        tp: HeldOut(float(np.mean(e)), float(np.percentile(e, 90)), float(np.max(e)), len(e))
        for tp, e in sorted(errors.items())
    }

"""How well step times are predicted that the model has not seen. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from pat_vllm.predictor.state import Floats
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profiling.profile import Profile, StepSample, StepShape


def held_out_error(profile: Profile, folds: int = 5, seed: int = 0) -> dict[int, Floats]:
    """Relative errors of predictions of steps that the model had not seen, by tp; fractions.

    Of steps without prompts, which are nearly all of a rollout's. All samples of a shape are held
    out together, for a repeated measurement of a shape that was learned says nothing. Folds are
    random over each size's shapes; a size that has too few is left out.
    """
    rng = np.random.default_rng(seed)
    parts: list[list[StepSample]] = [[] for _ in range(max(2, folds))]
    for tp in profile.layouts:
        shapes: defaultdict[StepShape, list[StepSample]] = defaultdict(list)
        for s in profile.steps:
            if s.tp == tp:
                shapes[replace(s.shape, longest=0)].append(s)
        for position, samples in zip(rng.permutation(len(shapes)), shapes.values(), strict=True):
            parts[position % len(parts)] += samples
    errors: defaultdict[int, list[float]] = defaultdict(list)
    for held in parts:
        kept = [s for part in parts if part is not held for s in part]
        model = StepTimeModel.fit(profile.model_copy(update={"steps": tuple(kept)}))
        for s in held:
            if s.tp in model.layouts and not s.prefill:
                errors[s.tp].append(abs(model.step(s.tp, s.shape) / s.seconds - 1))
    return {tp: np.array(found) for tp, found in sorted(errors.items())}

"""How well step times are predicted that the model has not seen. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.state import Floats
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profiling.profile import Profile, StepSample, StepShape


def held_out_error(profile: Profile, folds: int = 5, seed: int = 0) -> dict[Layout, Floats]:
    """Relative errors of predictions of steps that the model had not seen, by layout; fractions.

    Of steps without prompts, which are nearly all of a rollout's. All samples of a shape are held
    out together, for a repeated measurement of a shape that was learned says nothing. Folds are
    random over each layout's shapes; a layout that has too few is left out.
    """
    rng = np.random.default_rng(seed)
    parts: list[list[StepSample]] = [[] for _ in range(max(2, folds))]
    for layout in profile.layouts:
        shapes: defaultdict[StepShape, list[StepSample]] = defaultdict(list)
        for s in profile.steps:
            if s.layout == layout:
                shapes[replace(s.shape, longest=0)].append(s)
        for position, samples in zip(rng.permutation(len(shapes)), shapes.values(), strict=True):
            parts[position % len(parts)] += samples
    errors: defaultdict[Layout, list[float]] = defaultdict(list)
    for held in parts:
        kept = [s for part in parts if part is not held for s in part]
        model = StepTimeModel.fit(profile.model_copy(update={"steps": tuple(kept)}))
        for s in held:
            if s.layout in model.layouts and not s.prefill:
                errors[s.layout].append(abs(model.step(s.layout, s.shape) / s.seconds - 1))
    return {layout: np.array(errors[layout]) for layout in sorted(errors)}

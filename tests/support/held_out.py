"""How well step times are predicted that the model has not seen."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.state import Floats
from pat_vllm.predictor.steps.step_residual import folds as step_folds
from pat_vllm.predictor.steps.step_time import StepTimeModel
from pat_vllm.profile import Profile


def held_out_error(profile: Profile) -> dict[Layout, Floats]:
    """Relative errors of predictions of steps that the model had not seen, by layout; fractions.

    Of steps without prompts, which are nearly all of a rollout's. A layout that has too few shapes
    is left out.
    """
    errors: defaultdict[Layout, list[float]] = defaultdict(list)
    for held, kept in step_folds(profile.steps, 5, seed=0):
        model = StepTimeModel.fit(profile.model_copy(update={"steps": tuple(kept)}))
        for s in held:
            if s.layout in model.fits and not s.prefill:
                errors[s.layout].append(abs(model.step(s.layout, s.shape) / s.seconds - 1))
    return {layout: np.array(errors[layout]) for layout in sorted(errors)}

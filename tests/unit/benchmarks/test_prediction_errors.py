"""Errors of predicted lengths and steps, and the trainers' table, on numbers known beforehand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import lengths
from benchmarks.bench.workloads import WORKLOADS
from benchmarks.lengths import LengthError, PromptModel, errors_of, sibling_errors
from benchmarks.step_error import FLOORS, StepError, Visit, report
from benchmarks.trainers.iteration import CLAIRVOYANT, PAT, Times
from benchmarks.trainers.iteration import report as trainer_report
from pat_vllm.simulator import traces

# ---------------------------------------------------------------- lengths

START, _ = lengths.MOMENTS
WITHIN, BETWEEN, SAMPLES = 0.3, 1.0, 8
FAR = 1 << 20


def prompts(seed: int, count: int) -> traces.LengthTrace:
    return traces.grpo(count, SAMPLES, WITHIN, BETWEEN, 1000, FAR, seed)


def test_siblings_predict_what_they_can() -> None:
    """As the variance of the best linear prediction from seven siblings says."""
    fitted = PromptModel.of([prompts(seed, count=200) for seed in range(3)])
    assert fitted.within == pytest.approx(WITHIN, rel=0.05)
    assert fitted.between == pytest.approx(BETWEEN, rel=0.1)
    assert fitted.mean == pytest.approx(math.log(1000), abs=0.15)
    model = PromptModel(math.log(1000), BETWEEN, WITHIN)
    of_batches = [sibling_errors(model, prompts(seed, count=100)) for seed in range(8)]
    start, later = (np.concatenate(each) for each in zip(*of_batches, strict=True))
    left = BETWEEN**2 * WITHIN**2 / ((SAMPLES - 1) * BETWEEN**2 + WITHIN**2)
    error = LengthError.of(start)
    assert error.log_sd == pytest.approx(math.sqrt(WITHIN**2 + left), rel=0.03)
    assert error.factor == pytest.approx(1.0, abs=0.02)
    # A median.
    assert np.mean(start > 0) == pytest.approx(0.5, abs=0.02)
    assert np.mean(later > 0) == pytest.approx(0.5, abs=0.04)
    # Without siblings, an error is the spread of the lengths.
    of_runs = errors_of(lambda seed: traces.lognormal(300, 300, 0.8, FAR, seed), 2, 2)
    for of_moment in of_runs.values():
        assert of_moment[START].log_sd == pytest.approx(0.8, rel=0.06)


# ---------------------------------------------------------------- steps


def steady(predicted: float, medians: list[float]) -> list[Visit]:
    return [Visit([predicted] * 3, [0.5 * m, m, 5 * m]) for m in medians]


def test_medians_of_visits_are_compared() -> None:
    """Two kinds of steps: one comes out alike, the other drifts by a quarter."""
    error = StepError.of([steady(1.1, [1.0, 1.0, 1.0]), steady(1.0, [1.0, 1.25])])
    assert error.visits == 3
    assert error.error == pytest.approx((0.1 + 0.1 + 0.2) / 3)
    assert error.floor == pytest.approx((0 + 0 + 0.2) / 3)
    assert error.bias == pytest.approx((0.1 + 0.1 - 0.2) / 3)
    assert error.bar == pytest.approx(FLOORS * 0.2 / 3)
    single = StepError.of([[Visit([1.0], [2.0]), Visit([1.0, 3.0], [1.0, 4.0])]])
    assert single.single_error == pytest.approx((0 + 0.25) / 2)
    assert single.single_floor == pytest.approx((1 + 0.5) / 2)
    with pytest.raises(ValueError, match="two visits"):
        StepError.of([steady(1.0, [1.0])])
    kinds = {(tp, 8, 16): steady(1.01, [1.0, 1.02, 0.99]) for tp in (1, 2)}
    assert report(kinds, rounds=3, steps=3).count("| met |") == 2


# ---------------------------------------------------------------- iterations of trainers

WORKLOAD = WORKLOADS["lognormal"]


def times(*rollouts: float) -> Times:
    return Times(syncs=[1.0] * len(rollouts), rollouts=list(rollouts), switches=[1] * len(rollouts))


def test_table_of_trainers() -> None:
    sides = {"slow": times(20, 40), "fast": times(10, 20), PAT: times(9, 18)}
    text = trainer_report(WORKLOAD, WORKLOAD.trace(1), sides)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert "rollout / fast" in rows[0]
    assert "| 2.00 (2.00-2.00) | 2.00 (2.00-2.00) |" in rows[1]
    assert "| 31.00 (21.00-41.00) | 1.93 (1.91-1.95) |" in rows[1]  # with the sync
    assert rows[-1].startswith(f"| {PAT} | 13.50 (9.00-18.00) | 0.90 (0.90-0.90) |")
    assert CLAIRVOYANT not in text
    # The clairvoyant is no static side, and may be the only other one.
    against = {CLAIRVOYANT: times(6, 12), PAT: times(9, 18)}
    for others in ({"static": times(10, 20)}, {}):
        text = trainer_report(WORKLOAD, WORKLOAD.trace(1), others | against)
        assert f"{PAT} / {CLAIRVOYANT}: 1.50 (1.50-1.50)" in text

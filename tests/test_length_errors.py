"""What predicted lengths are off by, against what is known of how the lengths were made."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks import lengths
from benchmarks.lengths import LengthError, PromptModel, errors_of, file_errors, sibling_errors
from pat_vllm.simulator import traces
from tests.support.mutation import mutated

START, LATER = lengths.MOMENTS
WITHIN, BETWEEN, SAMPLES = 0.3, 1.0, 8
FAR = 1 << 20


def prompts(seed: int, count: int = 200) -> traces.LengthTrace:
    return traces.grpo(count, SAMPLES, WITHIN, BETWEEN, 1000, FAR, seed)


def test_equal_predictions_are_off_by_the_spread_of_the_lengths() -> None:
    found = errors_of(lambda seed: traces.lognormal(500, 300, 0.8, FAR, seed), batches=3, runs=2)
    assert found.keys() == {"none", "earlier iterations"}
    for errors in found.values():
        assert errors[START].log_sd == pytest.approx(0.8, rel=0.06)
    assert found["earlier iterations"][START].factor == pytest.approx(1.0, abs=0.12)


def test_parts_of_the_spread_are_told_apart() -> None:
    model = PromptModel.of([prompts(seed) for seed in range(3)])
    assert model.within == pytest.approx(WITHIN, rel=0.05)
    assert model.between == pytest.approx(BETWEEN, rel=0.1)
    assert model.mean == pytest.approx(math.log(1000), abs=0.15)


def check_siblings() -> None:
    """As the variance of the best linear prediction from seven siblings says."""
    model = PromptModel(math.log(1000), BETWEEN, WITHIN)
    found = [sibling_errors(model, prompts(seed, count=100)) for seed in range(8)]
    start, later = (np.concatenate(one) for one in zip(*found, strict=True))
    left = BETWEEN**2 * WITHIN**2 / ((SAMPLES - 1) * BETWEEN**2 + WITHIN**2)
    error = LengthError.of(start)
    assert error.log_sd == pytest.approx(math.sqrt(WITHIN**2 + left), rel=0.03)
    assert error.factor == pytest.approx(1.0, abs=0.02)
    # A median.
    assert np.mean(start > 0) == pytest.approx(0.5, abs=0.02)
    assert np.mean(later > 0) == pytest.approx(0.5, abs=0.04)


def test_siblings_tell_what_they_can() -> None:
    check_siblings()


@pytest.mark.parametrize(
    "change",
    [
        {"- 0.5 * (distance**2).sum(axis=0)": ""},
        {"(running - 1) * survived": "(running + 7) * survived"},
        {"(running - 1) * survived": "0 * survived"},
        {"(np.exp(survived) @ weight)": "weight.sum()"},
        {"np.interp(0.5, below, grid)": "np.interp(0.6, below, grid)"},
    ],
)
def test_mistakes_in_the_prediction_show(change: dict[str, str]) -> None:
    with mutated(PromptModel.median, change), pytest.raises(AssertionError):
        check_siblings()


def test_a_running_sample_is_longer_than_it_is() -> None:
    model = PromptModel(math.log(100), BETWEEN, WITHIN)
    for tick in (0, 1, 50, 5000):
        ended = [one for one in (40, 60) if one <= tick]
        median = model.median(ended, 2, tick, 6000)
        assert max(1, tick) <= median <= 6000


def test_a_file_of_ones_own() -> None:
    trace = prompts(2, count=60)
    found = file_errors(trace)
    assert found["siblings"][START].log_sd == pytest.approx(0.32, rel=0.1)
    spread = float(np.std(np.log(trace.lengths)))
    assert found["earlier iterations"][START].log_sd == pytest.approx(spread, rel=0.1)

"""What switching is worth, by control batches."""

from __future__ import annotations

import math
from random import Random

import pytest

from pat_vllm.reporting import BatchReport
from pat_vllm.reporting.control import compare


def batches_of(*seconds_per_token: float, every: int = 3) -> list[BatchReport]:
    """Batches of 100 tokens, each `every`-th of which is a control batch."""
    return [
        BatchReport(float(i), 100 * seconds, 8, 100, control=i % every == 0)
        for i, seconds in enumerate(seconds_per_token, 1)
    ]


def test_a_control_batch_is_compared_with_its_neighbours_alone() -> None:
    """By hand: log ratios of -0.2 and -0.1, the mean of two neighbours each."""
    e = math.exp
    found = compare(batches_of(9.0, 1.0, e(0.2), 1.0, 4.0 * e(-0.2), 4.0, 4.0))
    assert found is not None and found.controls == 2
    assert found.ratio == pytest.approx(e(-0.15))
    assert found.low == pytest.approx(e(-0.15 - 12.706 * 0.05))
    assert found.high == pytest.approx(e(-0.15 + 12.706 * 0.05))


def test_a_drift_of_the_lengths_is_no_difference() -> None:
    found = compare(batches_of(*(1.1**i for i in range(30))))
    assert found is not None and found.controls == 10
    # The last one has no batch after it.
    assert found.ratio == pytest.approx(1.1**-0.1)
    assert found.low < 1 < found.high


@pytest.mark.parametrize("controls", [2, 8])
def test_nineteen_of_twenty_intervals_hold_the_ratio(controls: int) -> None:
    random, held = Random(controls), 0
    for _ in range(1_000):
        seconds = [
            math.exp(random.gauss(0, 0.1)) * (1.0 if i % 3 == 0 else 0.9)
            for i in range(1, 3 * controls + 2)
        ]
        found = compare(batches_of(*seconds))
        assert found is not None and found.controls == controls
        held += found.low <= 0.9 <= found.high
    assert 930 < held < 970


def test_what_cannot_be_compared_is_left_out() -> None:
    plain, control = BatchReport(1.0, 1.0, 8, 100), BatchReport(2.0, 1.0, 8, 100, control=True)
    switched, empty = BatchReport(3.0, 1.0, 8, 100, 1, True), BatchReport(4.0, 1.0, 8, 0)
    assert compare([]) is None
    assert compare([plain, control, plain]) is None
    assert compare([plain, control, plain, switched, plain]) is None
    assert compare([control, control, empty, control]) is None
    found = compare([plain, empty, control, empty, plain, control])
    assert found is not None and found.controls == 2 and found.low == found.ratio == found.high

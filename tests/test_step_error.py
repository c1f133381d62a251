"""The error of predicted steps, and the machine's floor beside it: their arithmetic."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.step_error import BAR, FLOORS, StepError, Visit, report
from tests.support.mutation import mutated

SECONDS = st.floats(0.5, 2.0)
VISITS = st.builds(
    lambda predicted, real: Visit(predicted[: len(real)], real),
    st.lists(SECONDS, min_size=5, max_size=5),
    st.lists(SECONDS, min_size=1, max_size=5),
)


def steady(predicted: float, medians: list[float]) -> list[Visit]:
    return [Visit([predicted] * 3, [0.5 * m, m, 5 * m]) for m in medians]


def check_medians() -> None:
    """Two kinds of steps: one comes out alike, the other drifts by a quarter."""
    found = StepError.of([steady(1.1, [1.0, 1.0, 1.0]), steady(1.0, [1.0, 1.25])])
    assert found.visits == 3
    assert found.error == pytest.approx((0.1 + 0.1 + 0.2) / 3)
    assert found.floor == pytest.approx((0 + 0 + 0.2) / 3)
    assert found.bias == pytest.approx((0.1 + 0.1 - 0.2) / 3)
    assert found.bar == pytest.approx(FLOORS * 0.2 / 3)


def test_medians_of_visits_are_compared() -> None:
    check_medians()


@pytest.mark.parametrize(
    "change",
    [
        {"pairwise(visits)": "zip(visits, visits, strict=True)"},
        {"repeat.append(abs(earlier / real - 1))": "repeat.append(abs(real / earlier - 1))"},
        {"statistics.median(visit.real)": "statistics.mean(visit.real)"},
        {"statistics.mean(map(abs, signed))": "abs(statistics.mean(signed))"},
    ],
)
def test_mistakes_show(change: dict[str, str]) -> None:
    with mutated(StepError.of, change), pytest.raises(AssertionError):
        check_medians()


def test_single_steps_have_their_own_floor() -> None:
    found = StepError.of([[Visit([1.0], [2.0]), Visit([1.0, 3.0], [1.0, 4.0])]])
    assert found.single_error == pytest.approx((0 + 0.25) / 2)
    assert found.single_floor == pytest.approx((1 + 0.5) / 2)


@given(st.lists(st.lists(VISITS, min_size=2, max_size=4), min_size=1, max_size=3), SECONDS)
def test_the_unit_does_not_matter(kinds: list[list[Visit]], factor: float) -> None:
    scaled = [
        [Visit([factor * p for p in v.predicted], [factor * r for r in v.real]) for v in visits]
        for visits in kinds
    ]
    one, other = StepError.of(kinds), StepError.of(scaled)
    assert one.error == pytest.approx(other.error)
    assert one.floor == pytest.approx(other.floor)
    assert abs(one.bias) <= one.error + 1e-12
    assert one.bar >= BAR


def test_one_visit_is_no_repeat() -> None:
    with pytest.raises(ValueError, match="two visits"):
        StepError.of([steady(1.0, [1.0])])


def test_a_model_that_knows_the_medians_meets_the_bar() -> None:
    noise = random.Random(0)
    kinds = {
        (tp, requests, 16): [
            Visit([0.01] * 9, [0.01 * noise.gauss(1, 0.1) for _ in range(9)]) for _ in range(20)
        ]
        for tp in (1, 2)
        for requests in (1, 8)
    }
    found = StepError.of(kinds.values())
    assert found.error < found.floor and found.error <= found.bar
    text = report(kinds, rounds=20, steps=9)
    assert text.count("| met |") == 2 and "missed" not in text

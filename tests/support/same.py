"""What requests must give wherever they were generated: tokens, log-probabilities, how they end."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import pytest

from tests.support.engines import Job, Outcome, teacher_forced

TOLERANCE = 1e-4
PLAIN_TOLERANCE = 2e-4
"""For plain weights on CPU. Their kernels round by the size of the batch more than those for packed
weights: stock vLLM's log-probabilities of a request differ by up to 1.05e-4 between two batches."""

FP8_KV_TOLERANCE = 1.5e-2
"""For KV in 8 bits, where what is rounded otherwise is so by a sixteenth: two static layouts are up
to 8e-3 apart, stock vLLM's as well. By the scale or the KV of another layer it would be tenths."""


def of_batch(name: str) -> str:
    """The job of a batch of which another is a copy."""
    return name.split("/")[0]


def close(values: Sequence[float], tolerance: float = TOLERANCE) -> Any:
    """Compares equal to log-probabilities within the tolerance."""
    assert all(math.isfinite(value) for value in values)
    return pytest.approx(values, abs=tolerance)


def assert_same(
    outcomes: Mapping[str, Outcome],
    expected: Mapping[str, Outcome],
    tolerance: float = TOLERANCE,
    sampled: Container[str] = (),
) -> None:
    """What came back is what was expected, log-probabilities to the tolerance.

    Args:
        sampled: requests whose tokens no other run can tell.
    """
    assert outcomes.keys() == expected.keys()
    for name, outcome in outcomes.items():
        other = expected[name]
        assert len(outcome.token_ids) == len(other.token_ids), name
        assert outcome.prompt_logprobs == close(other.prompt_logprobs, tolerance), name
        if of_batch(name) not in sampled:
            assert outcome.token_ids == other.token_ids, name
            assert outcome.logprobs == close(other.logprobs, tolerance), name
            assert (outcome.text, outcome.finish_reason) == (other.text, other.finish_reason), name


def assert_teacher_forced(
    llm: Any,
    jobs: Mapping[str, Job],
    outcomes: Mapping[str, Outcome],
    tolerance: float = TOLERANCE,
) -> None:
    """Each token has the log-probability that the engine, as it is laid out now, gives to it.

    Ranks that drew different tokens would go on from different contexts.
    """
    assert outcomes
    scores = teacher_forced(llm, {n: (jobs[n].prompt, o.token_ids) for n, o in outcomes.items()})
    for name, scored in scores.items():
        assert outcomes[name].logprobs == close(scored, tolerance), name

"""What tests of logits processors ask for, and see. It imports no vLLM."""

from __future__ import annotations

from typing import Any

EVERY = 7
FORCED = 100
PLACES = ("dict", "array", "list", "nested")
"""Where `StepCounter` can keep its counts."""
THINK, STOP_THINKING = "<think>", " Stop now.</think>"
REASONING = {"reasoning_start_str": THINK, "reasoning_end_str": STOP_THINKING}


def counted(place: str) -> dict[str, Any]:
    """Sampling parameters that ask for a forced token, counted in a place."""
    return {"extra_args": {"count_in": place}}


def assert_counted(tokens: list[int]) -> None:
    """The token came in turn; in a random model it hardly comes otherwise."""
    assert all(token == FORCED for token in tokens[EVERY - 1 :: EVERY])
    assert tokens.count(FORCED) < len(tokens) / 4

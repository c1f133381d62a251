"""A reward that costs nothing and differs among responses."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """The share of spaces."""
    return solution_str.count(" ") / max(1, len(solution_str))

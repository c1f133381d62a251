"""What a solution is worth. VeRL loads this file by its path, so it imports nothing of ours."""

import re


def graded(text: str) -> int | None:
    """The answer that a solution gives, or None."""
    answers = re.findall(r"Answer: (\d+)", text)
    return int(answers[-1]) if answers else None


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """As VeRL asks for it: 1 for the right answer."""
    return float(str(graded(solution_str)) == ground_truth)

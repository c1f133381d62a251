"""Runs the GRPO example as a user would, and reads what it prints."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from tests.support.trainers import Run, example
from tests.verl.environment import ROOT

EXAMPLE = ROOT / "integrations" / "verl" / "examples" / "grpo.sh"
_KEYS = (
    "training/rollout_probs_diff_max",
    "response_length/max",
    "response_length/mean",
    "training/num_turns/mean",
)
_VALUE = r":(?:np\.float64\()?([^\s)]+)"
"""Some are numpy's, and print so."""


@dataclass(frozen=True)
class Step:
    """What verl logged of a training step."""

    probs_diff_max: float
    longest: float
    mean_length: float
    num_turns: float


class GRPO(Run):
    """A run of it."""

    def printed_by_workers(self) -> str:
        """Before Ray forwards it."""
        files = (self.work / "ray").glob("session_*/logs/worker-*")
        return "".join(file.read_text(errors="replace") for file in files if file.is_file())

    def steps(self) -> list[Step]:
        """The training steps that are complete."""
        return [
            Step(*[float(re.search(key + _VALUE, line)[1]) for key in _KEYS])  # type: ignore[index]
            for line in re.findall(r"\bstep:\d+ - .*", self.output)
        ]

    def rollouts(self) -> list[str]:
        """PAT's line about each rollout."""
        return re.findall(r"PAT rollout \d+ of replica 0, weights of step \d+: (.*)", self.output)


def grpo(*arguments: str) -> contextlib.AbstractContextManager[GRPO]:
    """Start the example with further arguments of verl."""
    return example(GRPO, EXAMPLE, "+ray_kwargs.ray_init.address=local", *arguments)

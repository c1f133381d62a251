"""Runs the example of integrations/openrlhf, and reads what it prints."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.trainers import Run, example

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "integrations" / "openrlhf" / "examples" / "reinforce.sh"

SWITCHING: Mapping[str, Any] = {"policy": {"kind": "schedule", "switch_at": {"12": 2}}}
"""To one group of 2 ranks when 12 responses are left, as the example does."""

COLOCATED = (
    *("--train.colocate_all", "--actor.num_gpus_per_node", "2"),
    *("--vllm.enable_sleep", "--ds.enable_sleep", "--vllm.sync_backend", "nccl"),
)
"""Training and rollouts share two GPUs, weights go by CUDA IPC, and each side sleeps."""

IN_SYNC = 1e-3
"""Bound of `vllm_kl` when rollouts and training have the same weights. Their bfloat16 kernels round
differently, which is 1e-4 of it; weights of the step before are 1e-1."""

_ENVIRONMENT = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class Training(Run):
    """A run of it."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What OpenRLHF reports of each training step."""
        steps = re.findall(r"Global step \d+: (.*})", self.output)
        return [ast.literal_eval(step) for step in steps]

    @property
    def rollouts(self) -> list[str]:
        """PAT's line about each rollout."""
        return re.findall(r"PAT rollout \d+: (.*)", self.output)

    def in_sync(self, bound: float = IN_SYNC) -> list[bool]:
        """Whether each step's rollout had the weights of the training."""
        return [abs(step["vllm_kl"]) < bound for step in self.steps]

    def switches(self) -> list[int]:
        """How often the engine switched in each rollout."""
        return [line.count(" -> ") for line in self.rollouts]

    def wait_for_text(self, text: str, times: int = 1) -> None:
        """Until `text` has been printed so often."""
        self.wait_for(lambda: self.output.count(text) >= times, repr(text))


@contextlib.contextmanager
def training(
    *arguments: str, pat: Mapping[str, Any] = SWITCHING, **environment: str
) -> Iterator[Training]:
    """Start the example with further arguments of OpenRLHF, options of PAT, and variables."""
    options = ("--vllm.pat", json.dumps(pat))
    variables = {**_ENVIRONMENT, **environment}
    with example(Training, EXAMPLE, *options, *arguments, **variables) as run:
        yield run


def assert_trained(
    training: Training, steps: int = 4, over_ray: bool = False, bound: float = IN_SYNC
) -> None:
    """It ran to its end, with a switch in each rollout and the training's weights in each.

    Args:
        bound: of each step's `vllm_kl`.
    """
    training.succeed()
    assert training.in_sync(bound) == [True] * steps, training.steps
    assert len(training.rollouts) == steps and all(training.switches()), training.rollouts
    assert ("RayWorkerProc" in training.output) == over_ray
    training.leaves_nothing()

"""Functions that tests call in the workers, which import this file."""

from __future__ import annotations

import importlib
from typing import Any


def runner_module(worker: Any) -> str:
    """Where the model runner comes from."""
    return type(worker.model_runner).__module__


def idle_requests(worker: Any) -> int:
    """Requests that the model runners of other layouts than the base layout know."""
    runners = [
        runtime.runner for runtime in worker._runtimes.values() if runtime is not worker._base
    ]
    return sum(len(runner.req_states.req_id_to_index) for runner in runners)


class _Counted:
    """In place of a kernel: counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


def searches(worker: Any) -> int:
    """How often this rank has looked for drafts since the last call; the first gives 0."""
    module: Any = importlib.import_module("pat_vllm.kernels.suffix_match")
    counted: Any = module.score_kernel
    launches = counted.launches if isinstance(counted, _Counted) else 0
    module.score_kernel = _Counted(getattr(counted, "kernel", counted))
    return launches

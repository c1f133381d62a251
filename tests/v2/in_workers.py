"""Functions that tests call in the workers, which import this file."""

from __future__ import annotations

import importlib
from contextlib import ExitStack
from typing import Any

from tests.support.mutation import mutated

_mistakes = ExitStack()


def runner_module(worker: Any) -> str:
    """Where the model runner comes from."""
    return type(worker.model_runner).__module__


def idle_requests(worker: Any) -> int:
    """Requests that the model runners of other layouts than the base layout know."""
    runners = [one.runner for one in worker._runtimes.values() if one is not worker._base]
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
    """How often this rank has looked for n-grams since the last call; the first gives 0."""
    module: Any = importlib.import_module("vllm.v1.worker.gpu.spec_decode.ngram.speculator")
    counted: Any = module._ngram_scan_kernel
    launches = counted.launches if isinstance(counted, _Counted) else 0
    module._ngram_scan_kernel = _Counted(getattr(counted, "kernel", counted))
    return launches


def make_mistake(worker: Any, function: str, changes: dict[str, str]) -> None:
    """Change a function of this process, see `tests.support.mutation`."""
    _mistakes.enter_context(mutated(find(function), changes))


def undo_mistakes(worker: Any) -> None:
    """Make no mistake any more, and forget what came of them."""
    _mistakes.close()
    for runtime in worker._runtimes.values():
        worker._activate(runtime)
        worker._handover.clear(runtime.runner)


def find(name: str) -> Any:
    """The function called `module:qualified.name`."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = vars(found)[part] if isinstance(found, type) else getattr(found, part)
    return found

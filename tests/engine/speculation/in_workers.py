"""Functions that tests call in the workers, which import this file."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import Any

_calls: Counter[str] = Counter()


def generated(worker: Any) -> dict[str, list[int]]:
    """Token ids of the output that a runner has for each request; idle layouts have none."""
    return {
        name: list(state.output_token_ids)
        for runtime in worker._runtimes.values()
        for name, state in runtime.runner.requests.items()
    }


def count_calls(worker: Any) -> None:
    """Count from now on what speculation calls in a step, in every layout."""
    for runtime in worker._runtimes.values():
        runner = runtime.runner
        _count(runner.drafter, "propose")
        _count(runner.rejection_sampler, "forward")
        _count(runner, "_calc_spec_decode_metadata")
        _count(runner, "_sample")


def take_calls(worker: Any) -> Counter[str]:
    """The calls since the last time, by name."""
    calls = _calls.copy()
    _calls.clear()
    return calls


def count_no_more(worker: Any) -> None:
    """Undo `count_calls`."""
    for runtime in worker._runtimes.values():
        runner = runtime.runner
        del runner.drafter.propose, runner.rejection_sampler.forward
        del runner._calc_spec_decode_metadata, runner._sample


def _count(owner: Any, name: str) -> None:
    stock = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        _calls[name] += 1
        return stock(*args, **options)

    setattr(owner, name, call)


def die_in_verification(worker: Any) -> None:
    """Make the last rank kill itself when it next verifies drafts, in whatever layout."""

    def die(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if worker.rank == 1:
        for runtime in worker._runtimes.values():
            runtime.runner.rejection_sampler.forward = die


def fail_in_drafter(worker: Any) -> None:
    """Make the drafter raise, in whatever layout."""

    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("no n-gram today")

    for runtime in worker._runtimes.values():
        runtime.runner.drafter.propose = fail

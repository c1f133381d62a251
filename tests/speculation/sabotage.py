"""What tests do to workers, which import this file."""

from __future__ import annotations

import os
import signal
from typing import Any


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

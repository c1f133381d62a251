"""Mistakes in the workers of an engine that `pat-vllm doctor` looks at, by environment variable.

The engine is given this module's class as `worker_extension_cls`, so that workers import it.
"""

from __future__ import annotations

import os
import signal
from typing import Any

VARIABLE = "PAT_TEST_SABOTAGE"


class Sabotage:
    """Adds nothing to a worker."""


def wrong_rows() -> None:
    """After a switch to tp=2, the rows of rank 1's weights are where they were."""
    from pat_vllm.layout import Layout
    from pat_vllm.weights.inplace import InPlaceShards

    arrange = InPlaceShards.arrange

    def forget(self: InPlaceShards, layout: Layout) -> int:
        if layout.tp == 2 and self._places[layout].tp_rank == 1:
            return 0
        return arrange(self, layout)

    InPlaceShards.arrange = forget  # type: ignore[method-assign]


def dies() -> None:
    """Rank 1 kills itself in the first switch that carries requests."""
    from pat_vllm.worker.worker import PATWorkerMixin

    switch = PATWorkerMixin.pat_switch

    def die(self: Any, command: Any) -> Any:
        if self.rank == 1 and command.placement:
            os.kill(os.getpid(), signal.SIGKILL)
        return switch(self, command)

    PATWorkerMixin.pat_switch = die  # type: ignore[method-assign]


if name := os.environ.get(VARIABLE):
    {"rows": wrong_rows, "dies": dies}[name]()

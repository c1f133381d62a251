"""What front ends may ask of the engine core, as `collective_rpc` of a command's name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pat_vllm.executor.rpc import (
    PROFILE_COMMAND,
    REPORT_COMMAND,
    SPECULATE_COMMAND,
    SWITCH_COMMAND,
)
from pat_vllm.profiling import load

if TYPE_CHECKING:
    from pat_vllm.scheduler.scheduler import PATScheduler


def register_commands(scheduler: PATScheduler) -> None:
    """Have the executor serve the commands."""
    active, controller = scheduler.replica_set, scheduler.controller

    def report(since: float = -math.inf) -> str:
        return controller.report(since).to_json()

    def profile(seconds: float) -> dict[str, Any]:
        if active.num_seqs or not controller.on_engine_thread:
            raise RuntimeError("the engine is busy; it can be profiled only while it is idle")
        controller.finish_work()
        scheduler.reset_prefix_cache()  # its memory is overwritten
        return load.measure(
            active.executor,
            scheduler.kv_cache_config,
            seconds,
            controller.switch_id,
            active.factory.seconds_to_make,
        )

    active.executor.register_command(SWITCH_COMMAND, controller.request_switch)
    active.executor.register_command(SPECULATE_COMMAND, controller.drafts.request)
    active.executor.register_command(REPORT_COMMAND, report)
    active.executor.register_command(PROFILE_COMMAND, profile)

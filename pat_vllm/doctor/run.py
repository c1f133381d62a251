"""Runs the doctor's process, and makes checks of what it tells and of how it ends."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from pat_vllm.doctor.child import environment, run_module
from pat_vllm.doctor.report import LOG_LINES, Check
from pat_vllm.doctor.request import REQUEST, Request

SILENCE = 420.0
"""Seconds without a sign of life, or a line of its log, after which a process is taken to hang."""

_DIED = re.compile(
    r"(?:Worker proc (?:VllmWorker-)?|RayWorkerProc rank=)(\w+) died unexpectedly"
    r"(?! \(exit code: 0\))(?: \(exit code: (-?\d+)\))?"
)
"""With exit code 0 a worker has ended by itself, after an error that is told elsewhere."""
_MEMORY = re.compile(
    r"^.*?((?:Free memory on device|No available memory for the cache blocks|"
    r"To serve at least one request|[\w.]*OutOfMemoryError|CUDA out of memory|"
    r"Cannot allocate memory|can't allocate memory|DefaultCPUAllocator|MemoryError|"
    r"No space left on device).*)$",
    re.MULTILINE,
)


def examine(
    request: Request, doing: Callable[[str], None], found: Callable[[Check], None]
) -> tuple[str, ...]:
    """Run all checks until one finds a problem.

    Args:
        doing: called with the name of what begins.
        found: called with each check; the last one has a problem unless all have passed.

    Returns:
        Last lines of the log if there was a problem.
    """
    last = "start of the process"
    failed: Check | None = None

    def told(event: dict[str, Any]) -> None:
        nonlocal last, failed
        if "doing" in event:
            last = event["doing"]
            doing(last)
        if "check" in event:
            check = Check(**event["check"])
            if check.problem is None:
                found(check)
            else:
                failed = check  # the log may say why

    variables = {"HF_HUB_OFFLINE": "1", **environment(request.ranks)}
    # An engine's core has a process of its own, as for users.
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    if "TORCHDYNAMO_DISABLE" not in os.environ:
        del variables["TORCHDYNAMO_DISABLE"]  # an engine compiles if its options say so
    request_text = REQUEST.dump_json(request).decode()
    ended = run_module("pat_vllm.doctor.examination", request_text, variables, told, SILENCE)
    if ended.answer is not None:  # then it may end as it likes
        return ()
    if failed is None:
        problem = f"the process ended with exit code {ended.code}"
        if ended.code is None:
            problem = f"it hangs: nothing for {SILENCE:.0f} s"
        failed = Check(last, problem=problem)
    if (cause := explain(ended.log)) is not None:
        first_line = (failed.problem or "").splitlines()[0][:160]
        failed = Check(failed.name, problem=f"{cause} ({first_line})", seconds=failed.seconds)
    found(failed)
    return tuple(ended.log.splitlines()[-LOG_LINES:])


def explain(log: str) -> str | None:
    """What ended an engine, by what it wrote; None if the log does not say.

    Too little memory comes first: a rank that found none may die of it.
    """
    if match := _MEMORY.search(log):
        return f"too little memory: {match[1].strip()}"
    if match := _DIED.search(log):
        code = f", exit code {match[2]}" if match[2] else ""
        return f"rank {match[1]} died{code}"
    return None

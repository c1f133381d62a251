"""What an engine's last words mean. Pure."""

from __future__ import annotations

import re

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

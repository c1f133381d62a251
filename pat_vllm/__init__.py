"""Tensor parallelism that changes during generation, as a vLLM plugin."""

from typing import Any

__version__ = "0.1.0"

__all__ = [
    "PATExecutor",
    "PATRayExecutor",
    "Report",
    "report",
    "report_async",
    "speculate",
    "speculate_async",
    "switch",
    "switch_async",
]

_HOME = {
    "PATExecutor": "pat_vllm.executor.executor",
    "PATRayExecutor": "pat_vllm.executor.ray",
    "Report": "pat_vllm.reporting",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that loading the plugin imports neither torch nor vLLM.
    if name in __all__:
        import importlib

        return getattr(importlib.import_module(_HOME.get(name, "pat_vllm.api")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

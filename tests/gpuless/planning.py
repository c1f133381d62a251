"""How vLLM's engine core plans KV caches, in the versions that PAT supports."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from inspect import signature
from typing import Any

from vllm.v1.worker.worker_base import WorkerBase

_MODULES = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")
"""Since vLLM 0.33, and before."""
planning: Any = importlib.import_module(next(name for name in _MODULES if find_spec(name)))


def tell_kv_cache_layout(worker: Any, engine: Any, name: str) -> None:
    """Tell a worker the KV cache layout that was resolved."""
    resolved = [name]
    if len(signature(WorkerBase.set_kv_cache_layout).parameters) > 2:  # since 0.33
        resolved.append(engine.parallel_config.cp_kv_cache_interleave_size)
    worker.set_kv_cache_layout(*resolved)


def plan_kv_cache(engine: Any, specs: dict[str, Any], num_bytes: int) -> Any:
    """The `KVCacheConfig` of the workers, for KV cache specs by layer and memory in bytes."""
    groups = []
    if len(signature(planning.get_kv_cache_configs).parameters) > 3:  # since 0.33
        groups.append(planning.get_global_kv_cache_groups(engine, [specs]))
    (planned,) = planning.get_kv_cache_configs(engine, [specs], [num_bytes], *groups)
    planned.kv_cache_layout = engine.cache_config.kv_cache_layout
    return planned

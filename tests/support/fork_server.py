"""Workers of engines in this process start from a server that has already imported vLLM.

A worker spends most of its start on imports: eight seconds, in which a small engine's tests could
have run. What a worker does is not changed, and neither is its environment.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

_PRELOADED = [
    "pat_vllm.worker.cpu_worker",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
]


def preload() -> None:
    """Say what the server of this process imports when it starts; there is one for all."""
    multiprocessing.set_forkserver_preload(_PRELOADED)


@functools.cache
def start_workers_from_server() -> None:
    """To be called before an engine is made; the server starts with the first worker."""
    import vllm.v1.executor.multiproc_executor as module

    preload()
    context = multiprocessing.get_context("forkserver")
    stock = module.get_mp_context

    def get_mp_context() -> Any:
        stock()  # vLLM's own preparations
        return _Context(context)

    module.get_mp_context = get_mp_context


class _Context:
    """A multiprocessing context whose processes have the environment of who starts them."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def Process(self, target: Callable[..., None], **arguments: Any) -> Any:
        inside = functools.partial(_run, dict(os.environ), target)
        return self._context.Process(target=inside, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _run(environment: Mapping[str, str], target: Callable[..., None], **arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(**arguments)

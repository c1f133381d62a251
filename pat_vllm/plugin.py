"""vLLM's entry point into PAT, and the only place where vLLM is patched.

Everything else rests on seams that vLLM offers: the executor class, `worker_cls`, `scheduler_cls`,
model loaders, the KV connector interface and `additional_config`.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

BACKEND = "pat"
"""Value of `distributed_executor_backend` that asks for PAT."""

TESTED_VLLM = ("0.32", "0.34")
"""vLLM versions PAT is tested with: from the first, up to but without the second."""

ALLOW_UNTESTED = "PAT_ALLOW_UNTESTED_VLLM"
"""Environment variable that lets PAT run on another vLLM version when set to 1."""


def register() -> None:
    """Teach vLLM the executor backend "pat". Called by vLLM in each of its processes.

    May be called several times in a process. Must neither fail nor cost anything where PAT is not
    asked for, so it imports nothing but the class that it patches.
    """
    from vllm.v1.executor.abstract import Executor

    _patch_get_class(Executor)
    # vLLM sets up handlers and level for the loggers below its own only.
    logging.getLogger("pat_vllm").parent = logging.getLogger("vllm")


def _patch_get_class(executor: Any) -> None:
    """Let `Executor.get_class` resolve "pat" and prepare the config of an engine that uses PAT.

    Without it: the bare name "pat" is taken for a dotted path and fails to import, and nothing
    sets `worker_cls` and `scheduler_cls`, which belong to the executor. vLLM calls the method
    with each `VllmConfig` it builds, in the front end, before any worker starts, which also makes
    it the place to refuse what PAT cannot do. vLLM has no registry of executor backends yet.
    """
    original = executor.get_class
    if getattr(original, "_pat_patch", False):
        return

    @functools.wraps(original)
    def get_class(vllm_config: Any) -> type:
        chosen: type
        if vllm_config.parallel_config.distributed_executor_backend == BACKEND:
            check_vllm_version()
            from pat_vllm.executor.launcher import executor_class

            chosen = executor_class(vllm_config)
        else:
            chosen = original(vllm_config)
        if getattr(chosen, "is_pat", False):
            check_vllm_version()
            from pat_vllm.executor.launcher import prepare_launch
            from pat_vllm.support import prepare

            prepare(vllm_config)
            prepare_launch(vllm_config, chosen)
        return chosen

    get_class._pat_patch = True  # type: ignore[attr-defined]
    executor.get_class = staticmethod(get_class)


def check_vllm_version() -> None:
    """Refuse a vLLM that PAT was not tested with.

    Raises:
        ValueError: the version is outside `TESTED_VLLM` and `PAT_ALLOW_UNTESTED_VLLM` is not 1.
    """
    from vllm.version import __version__

    if os.environ.get(ALLOW_UNTESTED) == "1":
        return
    first, past = (tuple(int(n) for n in v.split(".")) for v in TESTED_VLLM)
    try:
        version = tuple(int(n) for n in __version__.split("+")[0].split(".")[:2])
    except ValueError:
        version = (0, 0)
    if not first <= version < past:
        raise ValueError(
            f'distributed_executor_backend="{BACKEND}" is tested with vLLM >= {TESTED_VLLM[0]}, '
            f"< {TESTED_VLLM[1]}, but vLLM {__version__} is installed. Install a tested version, "
            f"or set {ALLOW_UNTESTED}=1 to try this one."
        )

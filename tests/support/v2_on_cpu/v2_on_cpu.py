"""Engines of this process with vLLM's Model Runner V2, on CPU. Test support only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import another_server

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
_PRELOADED = ("vllm.v1.worker.cpu.model_runner",)


VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
"""Of processes that have this folder, or `plain_weights`, on PYTHONPATH."""


@contextlib.contextmanager
def model_runner_v2() -> Iterator[None]:
    """Inside, the engines of `tests.support.engines` use Model Runner V2.

    Their workers have Triton's interpreter (`sitecustomize.py`). This process has none, whose
    vLLM was imported without; it is told only not to ask for it.
    """
    path = [str(FOLDER), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**VARIABLES, "PYTHONPATH": os.pathsep.join(path)}.items():
            patch.setenv(name, value)
        with another_server(_PRELOADED):
            # Beside the server, which imports it, too.
            import vllm.config.vllm as config
            import vllm.envs as envs

            patch.setattr(config, "HAS_TRITON", True)
            envs.disable_envs_cache()
            yield
    envs.disable_envs_cache()


@contextlib.contextmanager
def scheduled_asynchronously() -> Iterator[None]:
    """Inside, new engines schedule asynchronously, as on CUDA, which vLLM turns off on CPU."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        stock(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
        yield

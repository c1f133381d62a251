"""Stand-ins for a GPU machine, in every process that has this folder on PYTHONPATH.

Test support only: OpenRLHF 0.11.2 is written for CUDA. See `openrlhf_on_cpu.py` for what is put in
its place. Nothing is imported here before it is needed.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PATCHES = {
    "ray._private.worker": "give_gpus",
    "vllm.platforms.cpu": "look_like_gpus",
    "vllm.model_executor.layers.utils": "keep_weights_plain",
    "pat_vllm.executor.worker": "keep_layouts_stale",
    "openrlhf.utils.distributed_util": "sync_over_gloo",
    "openrlhf.trainer.ray.utils": "name_gpus",
    "openrlhf.trainer.ray.vllm_worker_wrap": "receive_on_cpu",
    "openrlhf.utils.deepspeed.deepspeed": "train_on_cpu",
}
"""Module -> function of `openrlhf_on_cpu` that patches it when it is imported."""


class _PatchOnImport(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._left = dict(PATCHES)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._left:
            return None
        patch = self._left.pop(name)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            import openrlhf_on_cpu

            execute(module)
            getattr(openrlhf_on_cpu, patch)(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


os.environ.setdefault("DS_ACCELERATOR", "cpu")
for _name in ("plain_weights", "ray_on_cpu"):
    sys.path.append(str(Path(__file__).parent.parent / _name))
sys.meta_path.insert(0, _PatchOnImport())

"""Has vLLM compile models on CPU as it does on CUDA, in processes with this folder on PYTHONPATH.

Test support only. vLLM compiles on CUDA by its own compiler (`VLLM_COMPILE`), piece by piece, and
keeps what it has compiled for the next start. On CPU it replaces that mode by a simpler one, and
its all-reduces have no name of their group in the compiled code. vLLM's code is the same otherwise.

It has to be a `sitecustomize`: workers are new processes. With `TRITON_INTERPRET=1` it lets Model
Runner V2 run, too, by `tests/support/v2_on_cpu`, as a process has one module of that name.
"""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from on_import import patch_on_import


def _patch_platform(module: Any) -> None:
    """Keep the mode that was asked for, and all-reduce by the operator that names the group."""
    platform = module.CpuPlatform
    stock = platform.check_and_update_config

    def check_and_update_config(vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        mode = compilation.mode
        # Other modes than the one that is replaced are left alone.
        compilation.mode = type(mode).NONE
        stock(vllm_config)
        compilation.mode = mode
        # As on CUDA once vLLM has chosen the sizes of its graphs.
        compilation.compile_sizes = compilation.compile_sizes or []

    platform.check_and_update_config = staticmethod(check_and_update_config)
    platform.use_custom_op_collectives = classmethod(lambda cls: True)
    # Of small functions beside the model, which would take a C++ compiler seconds.
    platform.simple_compile_backend = "eager"


def _patch_communicator(module: Any) -> None:
    """Leave the input alone, as CUDA's does: the compiler takes that operator at its word."""
    communicator = module.CpuCommunicator
    stock = communicator.all_reduce
    communicator.all_reduce = lambda self, input_: stock(self, input_.clone())


def _patch_registry(module: Any) -> None:
    """Look at a model class in this process. vLLM starts one for that, where its cache is new."""
    module._run_in_subprocess = lambda look: look()


patch_on_import(
    {
        "vllm.platforms.cpu": _patch_platform,
        "vllm.distributed.device_communicators.cpu_communicator": _patch_communicator,
        "vllm.model_executor.models.registry": _patch_registry,
    }
)
if os.environ.get("TRITON_INTERPRET") == "1":
    runpy.run_path(str(Path(__file__).parents[1] / "v2_on_cpu" / "sitecustomize.py"))
    # Inductor would ask it for a device, for which to compile.
    os.environ["TORCHINDUCTOR_TRITON_DISABLE_DEVICE_DETECTION"] = "1"

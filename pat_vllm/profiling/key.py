"""For what a profile holds: everything that changes how long an engine's steps take."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from pat_vllm import __version__
from pat_vllm.config import layouts_of, pat_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "hidden_act",
)
"""What Hugging Face configs call the sizes of a dense decoder."""
_THREADS = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
"""Environment variables that place the ranks of a CPU engine on its cores."""


def profile_key(vllm_config: VllmConfig) -> dict[str, Any]:
    """The key of an engine's profile: JSON values, without names and paths of this machine.

    The same engine has the same key whether its core runs in its caller's process or in its own.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    compilation = vllm_config.compilation_config
    assert model is not None
    eager = bool(model.enforce_eager)
    key: dict[str, Any] = {
        "model": _model(model.hf_text_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "hardware": hardware(),
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
        "layouts": [layout.tp for layout in layouts_of(vllm_config)],
        "weights": pat_config(vllm_config).weights,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_model_len": model.max_model_len,
        "block_size": vllm_config.cache_config.block_size,
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "enforce_eager": eager,
        "compiled": not eager and os.environ.get("TORCHDYNAMO_DISABLE") != "1",
        "cudagraph_mode": "NONE" if eager else _name(compilation.cudagraph_mode),
        "async_scheduling": bool(scheduler.async_scheduling),
        "runner": 2 if vllm_config.use_v2_model_runner else 1,
        "versions": {
            "vllm": vllm_version,
            "torch": str(torch.__version__),
            "pat_vllm": __version__,
        },
    }
    if current_platform.is_cpu():
        key["threads"] = {name: os.environ.get(name) for name in _THREADS}
    return key


def hardware() -> str:
    """The kind of device that a rank runs on, for a CPU with the number of usable cores."""
    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_name()}, {usable} cores"


def title(vllm_config: VllmConfig) -> str:
    """One line for people: model, hardware, ranks."""
    key = profile_key(vllm_config)
    model = key["model"]
    return (
        f"{model['architecture']}, {model.get('num_hidden_layers')} layers of "
        f"{model.get('hidden_size')}, vocabulary {model.get('vocab_size')}, {key['dtype']}; "
        f"{key['ranks']} ranks on {key['hardware']}"
    )


def _model(hf_config: Any) -> dict[str, Any]:
    names = getattr(hf_config, "architectures", None) or [getattr(hf_config, "model_type", "")]
    sizes = {name: getattr(hf_config, name, None) for name in _SIZES}
    return {"architecture": str(names[0]), **{k: v for k, v in sizes.items() if v is not None}}


def _name(value: Any) -> str:
    return str(getattr(value, "name", value))


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()

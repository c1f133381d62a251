"""For what a profile holds: everything that changes how long an engine's steps take.

A difference that the key misses makes an engine decide by another engine's times, silently. One
that does not matter only costs another measurement. So the key rather names too much.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from pat_vllm import __version__
from pat_vllm.models.drafters import has_weights
from pat_vllm.models.images import takes_images

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pat_vllm.executor.messages import ResolvedKernels
    from pat_vllm.start.setup import Setup

_SIZES = """
    num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads
    head_dim vocab_size tie_word_embeddings hidden_act num_experts num_local_experts
    n_routed_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
    n_shared_experts first_k_dense_replace moe_layer_freq kv_lora_rank q_lora_rank
    qk_nope_head_dim qk_rope_head_dim v_head_dim
    """.split()  # noqa: SIM905
"""What Hugging Face configs call the sizes of a decoder, and of its experts if it has any."""
_THREADS = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "OMP_NUM_THREADS")
"""Environment variables that place the ranks of a CPU engine on its cores."""
_LIBRARIES = ("triton", "flashinfer-python", "flash-attn", "deep-gemm", "amd-aiter")
"""Distributions with kernels that vLLM takes where they are installed."""
_COLLECTIVES = """
    NCCL_ALGO NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE NCCL_NVLS_ENABLE
    """.split()  # noqa: SIM905
"""Environment variables that change how fast ranks exchange activations."""
_KERNEL_WORDS = frozenset(
    """
    AITER ALLREDUCE ATTN ATTENTION AWQ B12X CUDAGRAPH CUTLASS DEEPEP EXPERTS FLA FLASH
    FLASHINFER FP4 FP8 GDN GEMM HPC HUMMING INDUCTOR INT4 INVARIANT KERNEL KERNELS LAYOUT MARLIN
    MFMA MLA MOE MXFP4 MXFP8 NCCL NVFP4 OINK PRECISION PYNCCL REDUCE SAMPLER SPARSE TRITON WNA16
    ZENTORCH
    """.split()  # noqa: SIM905
)
"""Words in the names of vLLM's environment variables that select kernels."""


def profile_key(vllm_config: VllmConfig, setup: Setup, resolved: ResolvedKernels) -> dict[str, Any]:
    """The key of an engine's profile: JSON values, without names and paths of this machine.

    The same engine has the same key whether its core runs in its caller's process or in its own.

    Args:
        resolved: what the workers chose where `vllm_config` leaves the choice to them.
    """
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    compilation, kernels = vllm_config.compilation_config, vllm_config.kernel_config
    assert model is not None
    eager = bool(model.enforce_eager)
    key: dict[str, Any] = {
        "model": _model(model.hf_text_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "hardware": hardware(),
        "ranks": vllm_config.parallel_config.tensor_parallel_size,
        "layouts": [str(layout) for layout in setup.layouts],
        "weights": resolved.weights,
        "attention_backends": list(resolved.attention),
        "attention": _differences(vllm_config.attention_config),
        "linear_backend": kernels.linear_backend,
        "linear_backend_per_quant": dict(kernels.linear_backend_per_quant or {}),
        "moe_backend": kernels.moe_backend,
        "quantization": model.quantization and str(model.quantization),
        "custom_all_reduce": not vllm_config.parallel_config.disable_custom_all_reduce,
        "max_num_seqs": by_name({tp: limit.max_num_seqs for tp, limit in setup.limits.items()}),
        "max_num_batched_tokens": by_name(
            {tp: limit.max_num_batched_tokens for tp, limit in setup.limits.items()}
        ),
        "max_model_len": model.max_model_len,
        "block_size": vllm_config.cache_config.block_size,
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "enforce_eager": eager,
        "compiled": not eager and os.environ.get("TORCHDYNAMO_DISABLE") != "1",
        "cudagraph_mode": "NONE" if eager else _name(compilation.cudagraph_mode),
        # A captured batch is padded to the next of these sizes.
        "cudagraph_sizes": [] if eager else list(compilation.cudagraph_capture_sizes or ()),
        "compilation_passes": {} if eager else _differences(compilation.pass_config),
        "async_scheduling": bool(scheduler.async_scheduling),
        "runner": 2 if vllm_config.use_v2_model_runner else 1,
        "versions": {
            "vllm": vllm_version,
            "torch": str(torch.__version__),
            "pat_vllm": __version__,
            **_installed(_LIBRARIES),
        },
        "environment": kernel_environment(os.environ),
    }
    if (speculative := vllm_config.speculative_config) is not None:
        key["speculation"] = {
            "method": speculative.method,
            "prompt_lookup": [speculative.prompt_lookup_min, speculative.prompt_lookup_max],
            "draft_lengths": list(setup.draft_lengths),
            "rejection_sample_method": speculative.rejection_sample_method,
            "earlier_responses": bool(setup.history_bytes),
        }
        if has_weights(speculative):
            key["speculation"]["drafter"] = _model(speculative.draft_model_config.hf_text_config)
    if takes_images(model):  # steps are given embeddings then, in place of ids
        key["images"] = True
    if setup.experts is not None:
        key["experts"] = setup.experts
    if current_platform.is_cpu():
        key["threads"] = {name: os.environ.get(name) for name in _THREADS}
    return key


def kernel_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that select kernels or collectives, as far as they are set; no paths."""
    names = [
        name
        for name in envs.environment_variables
        if _KERNEL_WORDS & set(name.split("_")) and not name.endswith(("_PATH", "_DIR"))
    ]
    return {name: environment[name] for name in (*names, *_COLLECTIVES) if name in environment}


def hardware() -> str:
    """The kind of device that a rank runs on, for a CPU with the number of usable cores."""
    if not current_platform.is_cpu():
        return str(current_platform.get_device_name())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_cpu_name()}, {usable} cores"


def title(key: Mapping[str, Any]) -> str:
    """One line for people: model, hardware, ranks, and the drafter if there is one."""
    model, speculation = key["model"], key.get("speculation")
    drafter = f"; {speculation['method']} drafts" if speculation else ""
    return (
        f"{model['architecture']}, {model.get('num_hidden_layers')} layers of "
        f"{model.get('hidden_size')}, vocabulary {model.get('vocab_size')}, {key['dtype']}; "
        f"{key['ranks']} ranks on {key['hardware']}{drafter}"
    )


def by_name(by_tp: Mapping[int, int]) -> dict[str, int]:
    """With keys as JSON has them."""
    return {str(tp): number for tp, number in by_tp.items()}


def _model(hf_config: Any) -> dict[str, Any]:
    names = getattr(hf_config, "architectures", None) or [getattr(hf_config, "model_type", "")]
    sizes = {name: getattr(hf_config, name, None) for name in _SIZES}
    return {"architecture": str(names[0]), **{k: v for k, v in sizes.items() if v is not None}}


def _differences(config: Any) -> dict[str, str]:
    """Fields of one of vLLM's configurations that are not as by default, as text."""
    usual = type(config)()
    values = {
        field.name: (getattr(config, field.name), getattr(usual, field.name))
        for field in dataclasses.fields(config)
    }
    return {name: _name(value) for name, (value, default) in values.items() if value != default}


def _installed(distributions: Sequence[str]) -> dict[str, str]:
    versions = {}
    for name in distributions:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


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

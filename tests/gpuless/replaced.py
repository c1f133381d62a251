"""What of vLLM is replaced where GPUs are imitated, and why: an imitation can hide a defect.

Kernels, and torch's view of a driver, of NCCL and of the compiler, are below vLLM and not listed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

_START = "; test_start.py runs vLLM's"
_GARBAGE = "collects garbage among all that is imported"
_NO_GPU = "asks a driver"
_ON_GPU = "has to say that there are GPUs"
_RANKS = "needs the other ranks"
_STATE = "state of the process, restored or new for each test"
_RECORDED = "calls are noted; NCCL or a kernel would carry them out"
_MODEL = "the runner has no model of vLLM's"

_WHY: dict[str, dict[str, str]] = {
    "vllm._aiter_ops:rocm_aiter_ops.": {"is_shuffle_kv_cache_enabled": "a user's variable"},
    "vllm.config.kernel:IrOpPriorityConfig.": {"set_default": _MODEL + _START},
    "vllm.config.vllm:": {"HAS_TRITON": "V2 asks for Triton, of which no kernel runs"},
    "vllm.device_allocator:": {"current_platform": _ON_GPU},
    "vllm.device_allocator.cumem:": {
        "create_and_map cumem_available current_alloc_conf libcudart unmap_and_release "
        "use_memory_pool_with_allocator": "an extension for CUDA; memory of the process instead",
        "gc": _GARBAGE,
    },
    "vllm.device_allocator.cumem:CuMemAllocator.": {"instance": _STATE},
    "vllm.distributed.device_communicators.custom_all_reduce:": {
        "custom_ar ops torch_symm_mem": "operators of CUDA",
        "gpu_p2p_access_check": "the question is noted; asks a driver in another process",
        "in_the_same_node_as": f"{_RANKS}; test_collectives.py runs vLLM's",
    },
    "vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce.": {
        "__init__": "vLLM's own, after it is noted",
        "all_reduce": _RECORDED,
    },
    "vllm.distributed.device_communicators.pynccl:": {"NCCLLibrary": "no NCCL"},
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.": {
        "_init_comm all_reduce": _RECORDED,
        "all_gather all_gatherv broadcast recv reduce_scatter send": "no NCCL",
    },
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.": {
        "create_from_process_group": f"{_RANKS}, which read; test_collectives.py runs vLLM's",
    },
    "vllm.distributed.device_communicators.symm_mem:": {"torch_symm_mem": _RECORDED},
    "vllm.distributed.parallel_state:": {
        "_DCP _DP _PCP _PP": f"{_RANKS}; processes are titled by these groups",
        "_ETP _TP": f"{_RANKS}; test_collectives.py runs vLLM's",
        "in_the_same_node_as": f"{_RANKS}; test_collectives.py runs vLLM's",
    },
    "vllm.distributed.weight_transfer.nccl_common:": {
        "stateless_init_process_group": f"{_RANKS} and a trainer",
    },
    "vllm.ir:": {"set_default_torch_wrap": _STATE + _START},
    "vllm.model_executor.model_loader.dummy_loader:": {
        "initialize_single_dummy_weight": "asks for a device's generator; weights have no contents",
    },
    "vllm.model_executor.models.registry:": {
        "_run_in_subprocess": "looks at each model class in a new process, which takes long",
    },
    "vllm.model_executor.warmup.jit_warmup_triton_helper:": {
        "_triton_key_deriver": "asks Triton what to compile; its interpreter compiles nothing",
    },
    "vllm.platforms:current_platform.": {
        "__class__": "vLLM's own class of a platform, with answers in place of a driver's",
        "_global_graph_pool": _STATE,
        "dist_backend": "gloo in place of NCCL",
        "get_global_graph_pool graph_pool_handle": _NO_GPU,
        "is_fully_connected": f"{_NO_GPU}; the question is noted",
        "is_device_capability is_pin_memory_available num_compute_units": _NO_GPU,
        "update_block_size_for_backend": _MODEL + _START,
    },
    "vllm.utils.mem_utils:": {"current_platform": _ON_GPU, "gc": _GARBAGE},
    "vllm.utils.torch_utils:": {"_current_stream_tls": "holds a stream of CUDA"},
    "vllm.v1.attention.backends.flash_attn:": {"get_scheduler_metadata": "a kernel"},
    "vllm.v1.executor.multiproc_executor:": {
        "decorate_logs set_process_title": "the title is noted; it would be the tests'",
    },
    "vllm.v1.worker.cpu_worker:CPUWorker.": {
        "determine_available_memory": "a given size; tests/engine runs vLLM's",
    },
    "vllm.v1.worker.gpu.buffer_utils:": {"UvaBuffer is_uva_available": "pinned memory"},
    "vllm.v1.worker.gpu.cudagraph_utils:": {
        "build_dynamic_sd_schedule_lookup": "itself; PAT's patch of it is restored",
        "current_platform": _NO_GPU,
        "get_pp_group": _RANKS,
        "set_current_vllm_config": _MODEL + _START,
    },
    "vllm.v1.worker.gpu.model_runner:": {
        "GPUModelRunner": f"takes memory as vLLM's, without a model{_START}",
    },
    "vllm.v1.worker.gpu_model_runner:": {
        "GPUModelRunner": "takes memory as vLLM's, without a model"
    },
    "vllm.v1.worker.gpu_worker:": {
        "HAS_TRITON": "V2 asks for Triton here, too, since vLLM 0.33; no kernel of it runs",
        "MemorySnapshot request_memory": _NO_GPU + _START,
        "current_platform": _ON_GPU + _START,
        "freeze_gc_heap gc": _GARBAGE + _START,
        "set_random_seed set_torch_threads_for_runtime": _STATE + _START,
        "get_model_loader set_current_vllm_config": _MODEL + _START,
        "get_pp_group init_worker_distributed_environment": _RANKS + _START,
        "init_workspace_manager": _MODEL + _START,
        "kernel_warmup": f"launches kernels of a model that is not there, or not on a GPU{_START}",
        "report_usage_stats": "sends to the network",
        "warn_if_flashinfer_kernels_missing": _NO_GPU + _START,
    },
    "vllm.v1.worker.gpu_worker:Worker.": {
        "_maybe_activate_jit_monitor compile_or_warm_up_model determine_available_memory": (
            _MODEL + _START
        ),
        "_maybe_get_memory_pool_context initialize_from_config": (
            f"KV has no memory; test_gpu_worker.py runs vLLM's{_START}"
        ),
        "_restore_sleep_parameters _save_sleep_parameters": "asks which parameters survive",
        "_scoped_allocator_max_split": "sets CUDA's allocator" + _START,
        "init_device": "there is no device" + _START,
        "shutdown": "is counted; test_gpu_worker.py runs vLLM's in another test",
        "synchronize_device": _NO_GPU + _START,
    },
    "vllm.v1.worker.utils:AttentionGroup.": {"create_metadata_builders": _MODEL + _START},
    "vllm.v1.worker.workspace:": {"_manager": _STATE},
}

REASONS = {
    owner + name: why
    for owner, reasons in _WHY.items()
    for names, why in reasons.items()
    for name in names.split()
}
"""By module, colon, and path in it."""


def replace(owner: Any, name: str, value: Any, put: Callable[..., Any] = setattr) -> Any:
    """Put a value in place of an attribute of vLLM's that is listed, and return what `put` does.

    Args:
        owner: a module, a class, or `current_platform`, which is listed under this name.
        put: as `setattr`, for instance a `MonkeyPatch`'s, or `mock.patch.object`.
    """
    from vllm.platforms import current_platform

    if isinstance(owner, ModuleType):
        where = f"{owner.__name__}:{name}"
    elif owner in (current_platform, type(current_platform)):
        where = f"vllm.platforms:current_platform.{name}"
    else:
        where = f"{owner.__module__}:{owner.__qualname__}.{name}"
    assert where in REASONS, f"{where} is replaced and not listed"
    asked = current_platform if owner is type(current_platform) else owner  # which may ask torch
    assert hasattr(asked, name), where
    return put(owner, name, value)

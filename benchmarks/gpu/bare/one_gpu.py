"""N ranks on one GPU, for machines that have no more: PAT_ONE_GPU=N (`start/sitecustomize.py`).

NCCL refuses ranks that share a device. So device groups are gloo's, whose collectives of tensors on
the GPU go through host memory. No CUDA graph captures that: an engine with graphs has vLLM's custom
all-reduce, which uses CUDA IPC, and that works between processes on one device, too. A rank's
kernel waits for the others', which the driver runs in turns. So results count, and times do not.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from pat_vllm.modelled.gpus import GiB
from tests.support.on_import import patch_on_import

if TYPE_CHECKING:
    import torch

RANKS = int(os.environ.get("PAT_ONE_GPU") or 1)

ENVIRONMENT = {
    "VLLM_DISABLE_PYNCCL": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    # Else vLLM and PAT ask the driver whether the GPU reaches itself as a peer, which it denies.
    "VLLM_SKIP_P2P_CHECK": "0",
}
"""Of vLLM's: nothing of NCCL, no symmetric memory."""


class Patch(NamedTuple):
    """Something that is replaced.

    Attributes:
        where: `module:name` or `module:Class.name`, where it is defined.
        parameters: names of those of a function or class method; None for a value.
        why: what needs it, or fails without it.
        make: the replacement, from what is replaced.
    """

    where: str
    parameters: str | None
    why: str
    make: Callable[[Any], Any]


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether gloo may not be given a tensor as it is."""
    return tensor.is_cuda


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for gloo: its threads may not write inference tensors, and sums are in float32."""
    import torch

    narrow = tensor.dtype in (torch.bfloat16, torch.float16)
    with torch.inference_mode(False), torch.no_grad():
        host = torch.empty(tensor.shape, dtype=torch.float32 if narrow else tensor.dtype)
        return host.copy_(tensor)


def _through_host(*tensors: str) -> Callable[[Any], Any]:
    """For a collective: the names of its tensors, that of the result first."""

    def make(stock: Any) -> Any:
        signature = inspect.signature(stock)

        @functools.wraps(stock)
        def staged(*args: Any, **kwargs: Any) -> Any:
            from torch.distributed import get_backend

            given = signature.bind(*args, **kwargs).arguments
            result = given[tensors[0]]
            if not on_gpu(result) or get_backend(given.get("group")) != "gloo":
                return stock(*args, **kwargs)
            hosts = {name: on_host(given[name]) for name in tensors}
            work = stock(**{**given, **hosts, "async_op": True})
            work.wait()
            result.copy_(hosts[tensors[0]])
            return work if given.get("async_op") else None

        return staged

    return make


def _of_first_device(stock: Any) -> Any:
    return lambda cls, device_id: stock(cls, 0)


def _on_a_stream_of_its_own(stock: Any) -> Any:
    @functools.wraps(stock)
    def init(*args: Any, **kwargs: Any) -> None:
        from vllm.utils import torch_utils

        stock(*args, **kwargs)
        torch_utils.current_stream()  # the first call makes it, and sets it

    return init


def _without_flashinfer(stock: Any) -> Any:
    @functools.wraps(stock)
    def resolve(vllm_config: Any) -> tuple[str, str]:
        requested, backend = stock(vllm_config)
        is_there = find_spec("flashinfer") and find_spec("cutlass")
        return requested, backend if is_there else "triton"

    return resolve


def _telling_memory(stock: Any) -> Any:
    @functools.wraps(stock)
    def phase(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(worker, *args, **kwargs)
        tell_memory(worker, stock.__name__)
        return result

    return phase


def tell_memory(worker: Any, when: str) -> None:
    """Print what is in use of a worker's device, by all ranks, and what torch holds in this one."""
    import torch

    free, total = torch.cuda.mem_get_info(worker.device)
    used, held = total - free, torch.cuda.memory_reserved(worker.device)
    most = torch.cuda.max_memory_reserved(worker.device)
    figures = f"device {used / GiB:.2f}, torch {held / GiB:.2f}, at most {most / GiB:.2f} GiB"
    print(f"memory of rank {worker.rank} after {when}: {figures}", flush=True)


_C10D, _CUDA = "torch.distributed.distributed_c10d", "vllm.platforms.cuda"
_ALL_REDUCE = "vllm.distributed.device_communicators.all_reduce_utils"
_GATHER = "output_tensor, input_tensor, group, async_op"
_ALL_TO_ALL = "output, input, output_split_sizes, input_split_sizes, group, async_op"
_BROADCAST = "tensor, src, group, async_op, group_src"
_LINKS = "cls, physical_device_ids"
_INIT = "vllm_config, rank, distributed_init_method, local_rank, backend"
_PHYSICAL = "vllm.platforms.interface:Platform.device_id_to_physical_device_id"
_SWAPPED = _through_host("output", "input")
_ONE, _TWO = _through_host("tensor"), _through_host("output_tensor", "input_tensor")
_PHASES = {
    "init_device": "self",
    "load_model": "self",
    "initialize_from_config": "self, kv_cache_config",
    "compile_or_warm_up_model": "self",
}
_RANKS, _TRUE = (lambda stock: lambda *args: RANKS), (lambda stock: lambda *args: True)

PATCHES = (
    Patch(f"{_C10D}:all_reduce", "tensor, op, group, async_op", "sums of layers; rates", _ONE),
    Patch(f"{_C10D}:broadcast", _BROADCAST, "what one rank gives the others", _ONE),
    Patch(f"{_C10D}:all_gather_into_tensor", _GATHER, "logits", _TWO),
    Patch(f"{_C10D}:all_to_all_single", _ALL_TO_ALL, "PAT's exchange of KV", _SWAPPED),
    Patch("torch.accelerator:device_count", "", "a worker's rank is a device's index", _RANKS),
    Patch(
        f"{_CUDA}:CudaPlatformBase.device_count",
        "cls",
        "vLLM wants a device a rank",
        _RANKS,
    ),
    Patch(
        f"{_CUDA}:CudaPlatformBase.dist_backend", None, "NCCL wants devices", lambda stock: "gloo"
    ),
    Patch(f"{_CUDA}:NvmlCudaPlatform.is_fully_connected", _LINKS, "four ranks want links", _TRUE),
    Patch(_PHYSICAL, "cls, device_id", "each rank has the device of its number", _of_first_device),
    Patch(
        "vllm.v1.worker.gpu_worker:init_worker_distributed_environment",
        _INIT,
        "NCCL's communicators have a worker leave the default stream",
        _on_a_stream_of_its_own,
    ),
    Patch(f"{_ALL_REDUCE}:gpu_p2p_access_check", "src, tgt", "custom all-reduce asks", _TRUE),
    Patch(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:_resolve_gdn_prefill_backend",
        "vllm_config",
        "vLLM takes FlashInfer's kernel without asking whether it, and what it needs, is installed",
        _without_flashinfer,
    ),
    *(
        Patch(f"pat_vllm.worker.worker:PATWorkerMixin.{name}", given, "memory", _telling_memory)
        for name, given in _PHASES.items()
    ),
)


def apply(module: Any) -> None:
    """Replace what is defined in a module."""
    for patch in PATCHES:
        where, _, dotted = patch.where.partition(":")
        if where == module.__name__:
            *owners, name = dotted.split(".")
            owner = functools.reduce(getattr, owners, module)
            stock = vars(owner)[name]
            of_class = isinstance(stock, classmethod)
            changed = patch.make(stock.__func__ if of_class else stock)
            setattr(owner, name, classmethod(changed) if of_class else changed)


def install() -> None:
    """Have each module changed when this process imports it."""
    os.environ.update(ENVIRONMENT)
    patch_on_import({patch.where.partition(":")[0]: apply for patch in PATCHES})

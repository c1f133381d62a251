"""What stands for CUDA, NCCL and GPUs where OpenRLHF runs on a CPU machine. Test support only.

Each function patches one module, named in `sitecustomize.py`.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

GPUS = "PAT_TEST_GPUS"
"""Environment variable: how many GPUs Ray is told that the machine has."""


def give_gpus(worker: Any) -> None:
    """Ray: a cluster that the driver starts has GPUs, and no dashboard."""
    init = worker.init

    @functools.wraps(init)
    def init_with_gpus(address: str | None = None, **options: Any) -> Any:
        if address is None and not os.environ.get("RAY_ADDRESS"):
            options = {
                "num_gpus": int(os.environ.get(GPUS, "4")),
                "num_cpus": 8,
                "include_dashboard": False,
                "object_store_memory": 200 << 20,
                **options,
            }
        return init(address, **options)

    worker.init = init_with_gpus


def look_like_gpus(module: Any) -> None:
    """vLLM: Ray places CPU workers by GPUs, and the engine may be put to sleep."""
    import ray_on_cpu

    ray_on_cpu.patch(module)
    module.CpuPlatform.is_sleep_mode_available = lambda self: True


def sync_over_gloo(module: Any) -> None:
    """OpenRLHF: the group of the weight sync is Gloo's in place of NCCL's."""
    module.stateless_init_process_group = lambda host, port, rank, world, device: _GlooGroup(
        host, port, rank, world
    )


class _GlooGroup:
    """As much of `PyNcclCommunicator` as OpenRLHF uses."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self._group: Any = stateless_init_torch_distributed_process_group(
            host, port, rank, world_size, backend="gloo"
        )

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()


def name_gpus(module: Any) -> None:
    """OpenRLHF: a GPU's UUID, the same for the actor and the engine's worker that share it."""
    module.get_physical_gpu_id = _gpu_id


def _gpu_id() -> str:
    import torch.distributed as dist

    # OpenRLHF puts actor i and the engine's rank i in bundle i; where the engine has a world, so
    # do the actors.
    return f"GPU-{dist.get_rank()}"


def receive_on_cpu(module: Any) -> None:
    """OpenRLHF's worker extension: weights arrive in memory of the CPU."""
    wrap = module.WorkerWrap
    for name in ("update_weight", "update_weight_cuda_ipc"):
        setattr(wrap, name, _on_cpu(getattr(wrap, name)))


def _on_cpu(update: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(update)
    def received(self: Any, *args: Any, **kwargs: Any) -> None:
        with _cuda_is_cpu():
            update(self, *args, **kwargs)

    return received


@contextlib.contextmanager
def _cuda_is_cpu() -> Iterator[None]:
    """`torch.empty(device="cuda")` allocates on the CPU, and there is nothing to wait for."""
    import torch

    empty, synchronize = torch.empty, torch.cuda.synchronize
    torch.empty = lambda *shape, device=None, **options: empty(*shape, **options)
    torch.cuda.synchronize = lambda: None
    try:
        yield
    finally:
        torch.empty, torch.cuda.synchronize = empty, synchronize


def train_on_cpu(module: Any) -> None:
    """PyTorch: the calls of `torch.cuda` that OpenRLHF's training makes mean the CPU."""
    import torch
    import torch.multiprocessing.reductions as reductions

    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: _Cpu("cpu")  # type: ignore[assignment, return-value]

    make = module.init_device_mesh
    module.init_device_mesh = lambda device, *args, **kwargs: make("cpu", *args, **kwargs)
    # CUDA IPC: the memory of another process.
    reductions.reduce_tensor = _share


class _Cpu(str):
    """The device "cpu", whose index in f"cuda:{...}" is 0."""

    def __format__(self, spec: str) -> str:
        return "0"


def _share(tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A handle with a device index in the place where CUDA's has it."""
    import torch

    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return _open, (raw, tensor.dtype, tuple(tensor.shape), None, None, None, 0)


def _open(raw: bytes, dtype: Any, shape: tuple[int, ...], *rest: Any) -> Any:
    import torch

    return torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)

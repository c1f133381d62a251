"""What the doctor has an engine's workers do. The functions travel to them (`collective_rpc`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm import LLM

Handle = tuple[Callable[..., Any], Sequence[Any]]
"""What makes a tensor of another process's memory, and its arguments."""


def graphs_of(worker: Any) -> tuple[int, str]:
    """How many CUDA graphs this rank has captured, and its `cudagraph_mode`."""
    from vllm.compilation.counter import compilation_counter

    mode = worker.model_runner.vllm_config.compilation_config.cudagraph_mode
    return compilation_counter.num_cudagraph_captured, getattr(mode, "name", str(mode))


def send_by_ipc(llm: LLM, model: str, on_cpu: bool) -> str:
    """Update from this process's memory: handles of it travel, as from a trainer on these GPUs.

    Args:
        model: folder of a checkpoint with one file of weights.

    Returns:
        What memory it was.
    """
    import torch
    from safetensors.torch import load_file
    from torch.multiprocessing import reductions, set_sharing_strategy

    def handle_of(weight: torch.Tensor) -> Handle:
        if not on_cpu:
            handle: Handle = reductions.reduce_tensor(weight)
            return handle
        storage = reductions.reduce_storage(weight.untyped_storage())
        return _shared_tensor, (storage, weight.dtype, weight.shape)

    set_sharing_strategy("file_system")  # on CPU, by a name
    handles, kept = {}, []
    for rank in range(llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size):
        device = torch.device("cpu") if on_cpu else torch.device("cuda", rank)
        weights = load_file(Path(model) / "model.safetensors", device=str(device))
        kept.append([(name, weight.clone()) for name, weight in weights.items()])
        handles[_memory_of(device, rank)] = [(name, handle_of(weight)) for name, weight in kept[-1]]
        if not on_cpu:
            torch.cuda.synchronize(device)
    llm.collective_rpc(load_by_ipc, args=(handles,))
    return "shared host memory" if on_cpu else "CUDA IPC"


def load_by_ipc(worker: Any, handles: Mapping[str, Sequence[tuple[str, Handle]]]) -> None:
    """Load weights that lie in another process's memory, as trainers' code in the worker does.

    Args:
        handles: of the weights, each with its name, by `_memory_of`.
    """
    import torch

    device = worker.device

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, (make, arguments) in handles[_memory_of(device, worker.rank)]:
            arguments = list(arguments)
            if device.type != "cpu":
                arguments[6] = device.index  # its number in this process
            yield name, make(*arguments)

    worker.model_runner.model.load_weights(weights())
    if device.type != "cpu":
        torch.cuda.synchronize()


def _memory_of(device: torch.device, rank: int) -> str:
    """A name of a rank's device for all processes."""
    import torch

    return f"{rank}" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def _shared_tensor(storage: Handle, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor in host memory that another process shares."""
    import torch

    make, arguments = storage
    return torch.empty(0, dtype=dtype).set_(make(*arguments), 0, shape)

"""What the doctor asks a worker, stock vLLM's or PAT's: a `worker_extension_cls`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FACTS_METHOD = "doctor_facts"
EXTENSION = "pat_vllm.doctor.in_workers.InWorkers"
Handle = tuple[Callable[..., Any], Sequence[Any]]
"""What makes a tensor of another process's memory, and its arguments."""


def load_by_ipc(worker: Any, handles: Mapping[str, Sequence[tuple[str, Handle]]]) -> None:
    """Load weights that lie in another process's memory, as trainers' code in the worker does.

    Args:
        handles: of the weights, each with its name, by `memory_of`.
    """
    import torch

    device = worker.device

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, (make, arguments) in handles[memory_of(device, worker.rank)]:
            arguments = list(arguments)
            if device.type != "cpu":
                arguments[6] = device.index  # its number in this process
            yield name, make(*arguments)

    worker.model_runner.model.load_weights(weights())
    if device.type != "cpu":
        torch.cuda.synchronize()


def memory_of(device: torch.device, rank: int) -> str:
    """A name of a rank's device for all processes."""
    import torch

    return f"{rank}" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def shared_tensor(storage: Handle, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor in host memory that another process shares."""
    import torch

    make, arguments = storage
    return torch.empty(0, dtype=dtype).set_(make(*arguments), 0, shape)


class InWorkers:
    """Added to the bases of vLLM's worker."""

    def doctor_facts(self) -> dict[str, Any]:
        """What this rank holds.

        Returns:
            Bytes: `weights` of each layout by its name, as the layout sees them; None where vLLM
            has packed them for its CPU kernels and freed what they were; `held`, of all
            layouts' weights together; `memory`, of the process on CPU, else of the device in use.
            `graphs`, CUDA graphs that were captured; `cudagraph_mode`, as it has come out.
        """
        import psutil
        import torch
        from vllm.compilation.counter import compilation_counter

        worker: Any = self
        runtimes = getattr(worker, "_runtimes", None)
        runners = {"stock": worker.model_runner}
        if runtimes:
            runners = {str(layout): one.runner for layout, one in runtimes.items()}
        storages: dict[int, int] = {}
        weights = {}
        for name, runner in runners.items():
            parameters = list(runner.get_model().parameters())
            packed = not all(one.numel() for one in parameters)
            size = sum(one.numel() * one.element_size() for one in parameters)
            weights[name] = None if packed else size
            of_model = (one.untyped_storage() for one in parameters)
            storages |= {one.data_ptr(): one.nbytes() for one in of_model}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            memory = total - free
        else:
            memory = psutil.Process().memory_info().rss
        config = next(iter(runners.values())).vllm_config.compilation_config
        return {
            "weights": weights,
            "held": sum(storages.values()),
            "memory": memory,
            "graphs": compilation_counter.num_cudagraph_captured,
            "cudagraph_mode": getattr(config.cudagraph_mode, "name", str(config.cudagraph_mode)),
        }

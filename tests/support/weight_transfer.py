"""vLLM's weight transfers on CPU: over NCCL with sockets in NCCL's place, the backend "sockets"; by
CUDA IPC with files that are mapped in its place, the backend "files".

All else is vLLM's: the phases, the group of trainer and workers, the loading layer by layer.
Importing this registers it, as trainers register their own where a worker's extension is imported.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import vllm.distributed.weight_transfer.ipc_engine as ipc_engine
import vllm.distributed.weight_transfer.nccl_common as nccl_common
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.utils.network_utils import get_open_port

SOCKETS, FILES = "sockets", "files"
_DEVICE = "the host"


class Sockets:
    """In place of `PyNcclCommunicator`."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: Any) -> None:
        self.rank = rank
        self.group = StatelessProcessGroup.create(host, port, rank, world_size)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        # As bytes: fp8 cannot be pickled.
        data = tensor.reshape(-1).view(torch.uint8) if self.rank == src else None
        received = self.group.broadcast_obj(data, src)
        if self.rank != src:
            tensor.copy_(received.view(tensor.dtype).view(tensor.shape))

    def destroy(self) -> None:
        """Nothing but the store, which goes with this object."""


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Inside, vLLM's code for transfers over NCCL runs on CPU."""
    with (
        mock.patch.object(nccl_common, "stateless_init_process_group", Sockets),
        mock.patch.object(torch.accelerator, "current_device_index", lambda: 0),
        mock.patch.object(torch.accelerator, "synchronize", lambda: None),
        mock.patch.object(torch.cuda, "current_stream", mock.MagicMock()),
    ):
        yield


class SocketsTransfer(NCCLWeightTransferEngine):
    def init_transfer_engine(self, init_info: Any) -> None:
        init_info.packed = False  # that takes streams
        with without_cuda():
            super().init_transfer_engine(init_info)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        with without_cuda():
            super().update_weights(update_info)


def _map_file(path: str, dtype: str, shape: Sequence[int], *_: Any) -> torch.Tensor:
    """In place of `rebuild_cuda_tensor`, which takes seven arguments; the last is the device's."""
    size = torch.Size(shape)
    return torch.from_file(path, True, size.numel(), dtype=getattr(torch, dtype)).view(size)


@contextlib.contextmanager
def mapped_files() -> Iterator[None]:
    """Inside, vLLM's code for transfers by CUDA IPC maps files."""
    properties = SimpleNamespace(uuid=_DEVICE)
    with (
        mock.patch.object(ipc_engine, "rebuild_cuda_tensor", _map_file),
        mock.patch.object(torch.cuda, "get_device_properties", lambda index: properties),
    ):
        yield


class FilesTransfer(ipc_engine.IPCWeightTransferEngine):
    def receive_weights(self, update_info: Any) -> None:
        with mapped_files():
            super().receive_weights(update_info)


for name, engine in ((SOCKETS, SocketsTransfer), (FILES, FilesTransfer)):
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, engine)


def described(weights: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """What a call tells of weights, however they travel."""
    return {
        "names": [name for name, _ in weights],
        "dtype_names": [_dtype_name(weight) for _, weight in weights],
        "shapes": [list(weight.shape) for _, weight in weights],
    }


def _dtype_name(weight: torch.Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")


class FilesTrainer:
    """A trainer on the engine's devices."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        llm.init_weight_transfer_engine({"init_info": {"packed": False}})

    def send(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """An `update_weights` with these weights, between start and finish."""
        with tempfile.TemporaryDirectory() as folder:
            handles = []
            for i, (_, weight) in enumerate(weights):
                path = Path(folder, str(i))
                path.write_bytes(weight.contiguous().view(torch.uint8).numpy().tobytes())
                handle = (str(path), _dtype_name(weight), list(weight.shape), 0, 0, 0, 0)
                handles.append({_DEVICE: handle})
            info = described(weights) | {"ipc_handles": handles}
            self._llm.update_weights({"update_info": info})


class Trainer:
    """A trainer's end: rank 0 of a group with an engine's workers."""

    def __init__(self, llm: Any, ranks: int) -> None:
        """Form the group. `llm`: an `LLM`, or whatever else has its methods for transfers."""
        self._llm = llm
        info = {
            "master_address": "127.0.0.1",
            "master_port": get_open_port(),
            "rank_offset": 1,
            "world_size": ranks + 1,
        }
        with self._beside(lambda: nccl_common.trainer_init(info)) as joined:
            llm.init_weight_transfer_engine({"init_info": info})
        self.group: Any = joined.result()

    def send(self, weights: Sequence[tuple[str, torch.Tensor]], as_before: bool = False) -> None:
        """An `update_weights` with these weights, between start and finish.

        Args:
            as_before: their names and shapes are those of the call before, and are not sent again,
                which vLLM 0.33 allows.
        """

        def broadcast() -> None:
            for _, weight in weights:
                self.group.broadcast(weight, src=0)

        with self._beside(broadcast):
            self._llm.update_weights({"update_info": described([] if as_before else weights)})

    @staticmethod
    @contextlib.contextmanager
    def _beside(work: Any) -> Iterator[Future[Any]]:
        """Run the trainer's part of a call while the workers run theirs."""
        with without_cuda(), ThreadPoolExecutor(1) as pool:
            done = pool.submit(work)
            yield done
            done.result()


def trainer_of(llm: Any) -> Trainer | FilesTrainer:
    """An engine joins one group, as with a trainer that lives as long."""
    if not hasattr(llm, "trainer"):
        backend = llm.llm_engine.vllm_config.weight_transfer_config.backend
        ranks = len(llm.collective_rpc("get_supported_tasks"))
        by_files = backend == FILES or backend.endswith("ipc")
        llm.trainer = FilesTrainer(llm) if by_files else Trainer(llm, ranks)
    return llm.trainer  # type: ignore[no-any-return]

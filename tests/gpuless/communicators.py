"""vLLM's groups and communicators of GPUs, over gloo; each call of a rank is noted.

They are vLLM's own. What they would ask of a GPU, of NCCL, of FlashInfer or of symmetric memory is
noted here, and waits for the other ranks as there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import vllm.distributed.parallel_state as parallel_state
import vllm.envs as envs
from vllm.distributed.device_communicators import custom_all_reduce, pynccl, symm_mem
from vllm.platforms import current_platform

from pat_vllm.kv_transfer import exchange
from tests.gpuless.replaced import replace
from tests.gpuless.sequences import Event

_CALLS = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
)
"""Of `torch.distributed`."""


class Recorder:
    """Notes what a rank calls, before it waits in it."""

    def __init__(self, rank: int, num_ranks: int, tell: Callable[[Event], None]) -> None:
        self.phase = "start"
        self.device = -1
        self._rank = rank
        self._world = tuple(range(num_ranks))
        self._tell = tell
        self._wait = dist.barrier

    def question(self, kind: str, *devices: int, group: Any = None) -> None:
        """Something is asked about devices, on some of a group's ranks."""
        self._note(kind, group, waits=False, devices=devices)

    def call(
        self, kind: str, group: Any, constructs: bool = False, detail: str = "", device: Any = None
    ) -> None:
        """All ranks of a group, or of the world before there is one, make a call."""
        devices = () if device is None else (int(device),)
        self._note(kind, group, devices=devices, constructs=constructs, detail=detail)

    def meet(self, kind: str, group: Any, **options: Any) -> None:
        """The same, where it is nothing but noted; ranks wait for each other."""
        self.call(kind, group, **options)
        self._wait(group)

    def _note(self, kind: str, group: Any, **more: Any) -> None:
        name, ranks = "world", self._world
        if group is not None and dist.is_initialized():
            name, ranks = group.group_name, tuple(dist.get_process_group_ranks(group))
        self._tell(Event(self._rank, self.phase, kind, name, ranks, **more))


def record_torch(recorder: Recorder) -> None:
    """Note the calls of `torch.distributed`."""
    for name in _CALLS:
        _note_calls(recorder, name)
    # All ranks have to make a group, also those that are not among its members.
    for name in ("init_process_group", "new_group"):
        _note_calls(recorder, name, constructs=True)


def _note_calls(recorder: Recorder, name: str, constructs: bool = False) -> None:
    original = getattr(dist, name)
    signature = inspect.signature(original)

    def noted(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        detail = " ".join(f"{each} {given.get(each)}" for each in ("src", "ranks", "backend"))
        if isinstance(tensor := given.get("tensor"), torch.Tensor):
            detail += f" {tensor.numel()} of {tensor.dtype}"
        group = None if constructs else given.get("group")
        recorder.call(name, group, constructs, detail)
        return original(*args, **kwargs)

    setattr(dist, name, noted)


def imitate_communicators(recorder: Recorder) -> None:
    """Have the communicators note what they would ask of libraries and devices."""
    for imitate in (_nccl, _custom_all_reduce, _symmetric_memory, _flashinfer, _exchanges):
        imitate(recorder)


def _all_reduce(recorder: Recorder, kind: str) -> Callable[..., torch.Tensor]:
    """In place of a communicator's method."""

    def reduce(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        detail = f"{tensor.numel()} of {tensor.dtype}"
        recorder.meet(kind, self.group, detail=detail, device=self.device.index)
        return tensor.clone()

    return reduce


def _nccl(recorder: Recorder) -> None:
    def init(self: Any, device: torch.device) -> None:
        self.device, self.comm = device, self.group
        recorder.meet("NCCL communicator", self.group, constructs=True, device=device.index)

    library = SimpleNamespace(
        ncclGetRawVersion=lambda: 22900,
        ncclGetVersion=lambda: "2.29.0",
        ncclGetUniqueId=pynccl.ncclUniqueId,
        has_symbol=lambda name: True,
        ncclCommSuspend=lambda group, flags: recorder.meet("NCCL suspends", group),
        ncclCommResume=lambda group: recorder.meet("NCCL resumes", group),
    )
    replace(pynccl, "NCCLLibrary", lambda path=None: library)
    replace(pynccl.PyNcclCommunicator, "_init_comm", init)
    replace(pynccl.PyNcclCommunicator, "all_reduce", _all_reduce(recorder, "NCCL all-reduce"))


def _custom_all_reduce(recorder: Recorder) -> None:
    custom: Any = custom_all_reduce.CustomAllreduce
    init, tried = custom.__init__, custom_all_reduce.gpu_p2p_access_check
    making: list[Any] = []

    def noted(self: Any, group: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        recorder.call("custom all-reduce's buffers", group, constructs=True, device=device.index)
        making.append(group)
        init(self, group, device, *args, **kwargs)
        making.pop()
        assert not self.disabled

    def can_access(own: int, other: int) -> bool:
        recorder.question("peer access", own, other, group=making[-1])
        return envs.VLLM_SKIP_P2P_CHECK or tried(own, other)

    def connected(cls: Any, devices: Sequence[int]) -> bool:
        recorder.question("links", *devices, group=making[-1])
        return True

    replace(custom, "__init__", noted)
    replace(custom, "all_reduce", _all_reduce(recorder, "custom all-reduce"))
    replace(custom_all_reduce, "gpu_p2p_access_check", can_access)
    torch.cuda.can_device_access_peer = can_access
    replace(type(current_platform), "is_fully_connected", classmethod(connected))
    ops = mock.MagicMock()
    ops.meta_size.return_value = 256
    ops.allocate_shared_buffer_and_handle.return_value = (1, "handle")
    ops.get_graph_buffer_ipc_meta.return_value = ([1], [2])
    replace(custom_all_reduce, "ops", ops)
    replace(custom_all_reduce, "custom_ar", True)


def _symmetric_memory(recorder: Recorder) -> None:
    def rendezvous(buffer: Any, group_name: str) -> Any:
        group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[attr-defined]
        options = {"constructs": True, "detail": f"{buffer.size} elements"}
        recorder.meet("symmetric memory", group, device=buffer.device.index, **options)
        return SimpleNamespace(multicast_ptr=0)

    symmetric: Any = SimpleNamespace(
        empty=lambda size, device, dtype: SimpleNamespace(size=size, device=device),
        rendezvous=rendezvous,
    )
    for module in (custom_all_reduce, symm_mem):
        replace(module, "torch_symm_mem", symmetric)


def _flashinfer(recorder: Recorder) -> None:
    import flashinfer.comm as library
    from vllm.distributed.device_communicators import flashinfer_all_reduce as flashinfer

    def create_workspace(backend: str, group: Any, **options: Any) -> Any:
        recorder.meet("FlashInfer workspace", group, constructs=True, device=recorder.device)
        return SimpleNamespace(
            backend=backend,
            group=group,
            mc_ptr=1,
            is_buffer_size_sufficient=lambda **problem: True,
            destroy=lambda: None,
            checkpoint_prepare=lambda: recorder.meet("FlashInfer suspends", group),
            checkpoint_restore=lambda backend: recorder.meet("FlashInfer resumes", group),
        )

    def fused(input: torch.Tensor, workspace: Any, **options: Any) -> torch.Tensor:
        detail = f"in the group {parallel_state.get_tp_group().ranks}"
        recorder.meet(
            "FlashInfer all-reduce", workspace.group, detail=detail, device=recorder.device
        )
        return input.clone()

    assert flashinfer.fi_ar_available
    library.create_allreduce_fusion_workspace = create_workspace
    library.allreduce_fusion = fused


def _exchanges(recorder: Recorder) -> None:
    init = exchange.CollectiveTransport.__init__

    def noted(self: Any, group: Any, device: torch.device) -> None:
        recorder.call("exchange", group, constructs=True, device=device.index)
        init(self, group, device)

    exchange.CollectiveTransport.__init__ = noted  # type: ignore[method-assign]

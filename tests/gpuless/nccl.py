"""NCCL's collectives between imitated devices, and a trainer that sends weights by them.

As torch has them: a collective that is not waited for runs on the communicator's own stream, behind
what the current stream has in its queue, and `wait` has the current stream wait for it. Until then
torch keeps its tensors. Any other collective runs on the current stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.gpuless.streams import Stream, current_stream, here, unseen

if TYPE_CHECKING:
    from tests.gpuless.devices import Devices

_PATIENCE = 240.0


class Group:
    """In place of a process group; its ranks are threads."""

    def __init__(self, devices: Devices, size: int) -> None:
        self.size = size
        self.keeps: list[Any] = []
        self._devices = devices
        self._streams: dict[int, Stream] = {}
        self._given: list[Any] = [None] * size
        self._meet = threading.Barrier(size, timeout=_PATIENCE)
        devices.on_error.append(self._meet.abort)

    @property
    def stream(self) -> Stream:
        """The communicator's own, on this rank."""
        rank = here.thread.device.index
        if rank not in self._streams:
            self._streams[rank] = Stream()
        return self._streams[rank]

    def gather(self, value: Any) -> list[Any]:
        """What each rank has given."""
        self._given[here.thread.device.index] = value
        self._meet.wait()
        every = list(self._given)
        self._meet.wait()
        return every


class Work:
    """A collective under way."""

    def __init__(self, stream: Stream, group: Group, tensors: Sequence[torch.Tensor]) -> None:
        self._event = stream.record_event()
        self._kept = list(tensors)
        # One that nobody waits for is waited for by torch, before it lets go of the tensors.
        group.keeps.append(self._kept)

    def wait(self) -> None:
        current_stream().wait_event(self._event)
        self._kept.clear()


def distributed(devices: Devices) -> Any:
    """In place of the module `torch.distributed`, for instances of `Group`.

    It knows one kind of call: NCCL takes memory for each kind, which nobody would have counted.
    """

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        stream = group.stream if async_op else current_stream()
        if async_op:
            stream.wait_stream(current_stream())
        actor, own = stream.work(), here.thread.device.index
        devices.access(actor, input, writes=False)
        with unseen():
            each = [len(input) // group.size] * group.size
            sent = [part.clone() for part in input.split(input_split_sizes or each)]
            every = group.gather((dict(actor.clock), sent))
            received = [parts[own] for _, parts in every]
            assert [len(part) for part in received] == (output_split_sizes or each)
            output.copy_(torch.cat(received))
        # Who sends and who receives wait for each other.
        for (clock, _), to, come in zip(every, sent, received, strict=True):
            if len(to) or len(come):
                actor.knows(clock)
        devices.access(actor, output, writes=True)
        return Work(stream, group, [output, input]) if async_op else None

    return SimpleNamespace(
        get_world_size=lambda group: group.size,
        all_to_all_single=all_to_all_single,
    )


class Trainer:
    """In place of vLLM's `PyNcclCommunicator`; the other end sends these tensors, one by one."""

    def __init__(self, devices: Devices, tensors: Iterable[torch.Tensor]) -> None:
        self._devices = devices
        self._clock: dict[str, int] = {}
        with unseen():
            self._rest = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Stream | None = None) -> None:
        """The next bytes arrive, on the current stream unless told otherwise."""
        assert src == 0
        actor = (stream or current_stream()).work()
        # NCCL does what one communicator is given in order, whichever the streams.
        actor.knows(self._clock)
        self._clock = dict(actor.clock)
        with unseen():
            tensor.copy_(self._rest[: tensor.nbytes])
            self._rest = self._rest[tensor.nbytes :]
        self._devices.access(actor, tensor, writes=True)

"""Staging memory that the CPU ranks of one host share, in place of a collective over sockets.

Each rank packs KV blocks into a segment of its own, and unpacks the parts that are meant for it
from all ranks' segments. So bytes are copied twice, at the speed of memory.
`best_transport` in `exchange.py` chooses it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

_PAGE = 4096
"""Bytes of a segment's header."""
_FIXED_WORDS = 2
"""8-byte words of a header before the starts of the parts: barriers reached, bytes of data."""
_KEPT_BYTES = 64 << 20
"""Staging memory that is kept from one switch to the next; what is larger is given back."""
_TIMEOUT_SECONDS = 300.0
"""Longest wait of a rank for another one, as long as vLLM by default waits for a step."""
_SPINS = 20_000
"""Times that a waiting rank polls another's header before it sleeps between polls."""

_fence_lock = threading.Lock()


class SharedMemoryTransport:
    """A `Transport` (`kv_transfer/exchange.py`) over shared memory. Made by `connect`."""

    depth = 1
    receives = False

    def __init__(self, group: dist.ProcessGroup, segments: Sequence[_Segment]) -> None:
        self._rank = dist.get_rank(group)
        self._segments = segments
        self._own = segments[self._rank]
        self._barriers = 0
        self._dtype = torch.uint8
        self._receive_bytes: list[int] = []
        self._parts: list[torch.Tensor] | None = None
        self.send = torch.empty(0, dtype=torch.uint8)

    @classmethod
    def connect(cls, group: dist.ProcessGroup) -> SharedMemoryTransport | None:
        """Share memory with all ranks of a CPU process group. Every rank calls it.

        Returns:
            None, on every rank, when one cannot map the memory of all, or the header has too few
            words for all ranks.
        """
        world_size = dist.get_world_size(group)
        if world_size > _PAGE // 8 - _FIXED_WORDS:
            return None
        own = _Segment.create()
        addresses: list[str | None] = [None] * world_size
        dist.all_gather_object(addresses, own and own.address, group=group)
        segments = [
            own if rank == dist.get_rank(group) else _Segment.attach(address)
            for rank, address in enumerate(addresses)
        ]
        attached = [segment for segment in segments if segment is not None]
        everywhere: list[bool] = [False] * world_size
        dist.all_gather_object(everywhere, len(attached) == world_size, group=group)
        return cls(group, attached) if all(everywhere) else None

    def prepare(
        self,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        dtype: torch.dtype,
        room: int,
    ) -> None:
        size = dtype.itemsize
        self._own.resize(sum(send_counts) * size)
        start = 0
        for peer, count in enumerate(send_counts):
            self._own.header[_FIXED_WORDS + peer] = start
            start += count * size
        self.send = self._own.part(0, start).view(dtype)
        self._dtype = dtype
        self._receive_bytes = [count * size for count in receive_counts]
        self._parts = None

    def begin(self) -> None:
        self._barrier()

    def finish(self) -> list[torch.Tensor]:
        if self._parts is None:  # from `prepare` on, they lie at the same place for each layer
            self._parts = []
            for segment, size in zip(self._segments, self._receive_bytes, strict=True):
                segment.follow()
                start = int(segment.header[_FIXED_WORDS + self._rank])
                self._parts.append(segment.part(start, size).view(self._dtype))
        return self._parts

    def done(self) -> None:
        self._barrier()

    def release(self) -> None:
        self._parts = None
        self.send = torch.empty(0, dtype=torch.uint8)
        if self._own.size > _KEPT_BYTES:
            self._own.resize(0)
        for segment in self._segments:
            if segment.size > _KEPT_BYTES:
                segment.forget()

    def _barrier(self) -> None:
        """Wait until every rank is here; what they wrote before is then visible."""
        self._barriers += 1
        _fence()
        self._own.header[0] = self._barriers
        _fence()
        give_up = time.monotonic() + _TIMEOUT_SECONDS
        for rank, segment in enumerate(self._segments):
            spins = 0
            while segment.header[0] < self._barriers:
                spins += 1
                if spins < _SPINS:
                    os.sched_yield()
                    continue
                time.sleep(50e-6)
                if time.monotonic() > give_up:
                    raise TimeoutError(
                        f"rank {self._rank} waited {_TIMEOUT_SECONDS:.0f} s for rank {rank} in a "
                        "KV exchange"
                    )
        _fence()


class _Segment:
    """Anonymous memory of one rank that others can map: a header of one page, then data.

    It has no name in any file system, so nothing is left behind whichever way a process ends.

    Attributes:
        header: int64 words: barriers reached, bytes of data, then where each rank's part starts.
        address: what others need for `attach`.
        size: bytes of data, as this process maps it.
    """

    def __init__(self, path: str, address: str) -> None:
        self._path = path
        self._data = torch.empty(0, dtype=torch.uint8)
        self.address = address
        self.header = torch.from_file(path, shared=True, size=_PAGE // 8, dtype=torch.int64).numpy()
        self.size = 0

    @classmethod
    def create(cls) -> _Segment | None:
        """A new segment without data; None where the platform cannot make one."""
        if not hasattr(os, "memfd_create"):
            return None
        name = f"pat-kv-{secrets.token_hex(8)}"
        # Closed by the end of the process.
        descriptor = os.memfd_create(name)
        os.fchmod(descriptor, 0o600)  # it comes with 0777
        os.truncate(descriptor, _PAGE)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return cls(path, f"{path} {name}")

    @classmethod
    def attach(cls, address: str | None) -> _Segment | None:
        """Another rank's segment; None when it is out of reach."""
        if address is None:
            return None
        path, name = address.split()
        with contextlib.suppress(OSError, RuntimeError):
            # Ranks on another host, or in another container, have other files by the same path.
            if os.readlink(path) == f"/memfd:{name} (deleted)":
                return cls(path, address)
        return None

    def resize(self, size: int) -> None:
        """Make room for `size` bytes; 0 gives the memory back. Only the owner calls it."""
        if 0 < size <= self.size:
            return
        # Torch could make the file larger, but would write a zero into the header, where others may
        # still look for the last barrier.
        os.truncate(self._path, _PAGE + size)
        self.header[1] = size
        self.follow()

    def follow(self) -> None:
        """Map what the owner has made room for."""
        size = int(self.header[1])
        if size == self.size:
            return
        self.forget()
        if size:
            whole = torch.from_file(self._path, shared=True, size=_PAGE + size, dtype=torch.uint8)
            self._data = whole[_PAGE:]
        self.size = size

    def forget(self) -> None:
        """Unmap the data."""
        self._data = torch.empty(0, dtype=torch.uint8)
        self.size = 0

    def part(self, start: int, size: int) -> torch.Tensor:
        """`size` bytes of the data."""
        return self._data[start : start + size]


def _fence() -> None:
    """A full memory barrier (taking a lock is one): stores before it are seen before later ones."""
    with _fence_lock:
        pass

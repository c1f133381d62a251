"""The collective that moves KV bytes between ranks: pack, swap, unpack."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist

from pat_vllm.kernels.kv import StagedBlocks, staged_blocks
from pat_vllm.kv_transfer.plan import BlockMove, RankMoves
from pat_vllm.kv_transfer.shared_memory import SharedMemoryTransport


class Transport(Protocol):
    """Takes packed bytes from every rank to every rank. All ranks make all calls alike.

    For each layer: pack into `send`, `swap`, unpack what it returns, `done`.
    """

    send: torch.Tensor
    """Flat buffer in which the parts for rank 0, 1, ... follow each other."""

    def prepare(
        self, send_counts: Sequence[int], receive_counts: Sequence[int], dtype: torch.dtype
    ) -> None:
        """Make room for parts of these sizes (elements, by rank)."""
        ...

    def swap(self) -> list[torch.Tensor]:
        """What each rank has packed for this one; flat, valid until `done`.

        On CUDA, consecutive parts of one buffer.
        """
        ...

    def done(self) -> None:
        """The parts have been read; `send` may be filled again."""
        ...

    def release(self) -> None:
        """Give large buffers back."""
        ...


class CollectiveTransport:
    """A `Transport` over `torch.distributed`, for any device and any number of hosts."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._send_counts: list[int] = []
        self._receive_counts: list[int] = []
        self.release()

    def prepare(
        self, send_counts: Sequence[int], receive_counts: Sequence[int], dtype: torch.dtype
    ) -> None:
        """See `Transport`."""
        self._send_counts, self._receive_counts = list(send_counts), list(receive_counts)
        self.send = torch.empty(sum(send_counts), dtype=dtype, device=self._device)
        self._receive = torch.empty(sum(receive_counts), dtype=dtype, device=self._device)

    def swap(self) -> list[torch.Tensor]:
        """See `Transport`."""
        dist.all_to_all_single(
            self._receive, self.send, self._receive_counts, self._send_counts, group=self._group
        )
        return list(self._receive.split(self._receive_counts))

    def done(self) -> None:
        """See `Transport`."""

    def release(self) -> None:
        """See `Transport`."""
        self.send = self._receive = torch.empty(0, device=self._device)


def best_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Shared memory for CPU ranks of one host, else `torch.distributed`. Every rank calls it."""
    shared = SharedMemoryTransport.connect(group) if device.type == "cpu" else None
    return shared or CollectiveTransport(group, device)


def _staged(
    moves_by_peer: Iterable[Iterable[BlockMove]], view: torch.Tensor, from_source: bool
) -> StagedBlocks:
    """The blocks of `view` that the moves to, or from, each rank read or write."""
    return staged_blocks(
        [
            [
                (move.source_blocks, move.route.source_heads)
                if from_source
                else (move.target_blocks, move.route.target_heads)
                for move in moves
            ]
            for moves in moves_by_peer
        ],
        view,
    )


class Exchange:
    """All-to-all of KV blocks over the ranks of a process group. Every rank makes every call.

    Attributes:
        bytes_sent: KV bytes that this rank has packed since the last `staging`, those that it
            keeps included.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, transport: Transport | None = None
    ) -> None:
        self._group = group
        self._device = device
        self._transport = transport or best_transport(group, device)
        self._staged: tuple[StagedBlocks, StagedBlocks] | None = None
        self.bytes_sent = 0

    @contextmanager
    def staging(
        self, moves: RankMoves, source: torch.Tensor, target: torch.Tensor
    ) -> Iterator[None]:
        """Stage the same `moves` for any number of layers, one at a time.

        Args:
            moves: this rank's part of the plan.
            source, target: views of one layer in the two layouts, [blocks, heads, tokens,
                content], which tell the sizes; all layers must be alike.

        Staging takes the bytes of one layer's moves, or twice that where a transport does not
        share memory. It is needed even for bytes that stay on their rank, for both views lie over
        the same memory.
        """
        source, target = _words(source), _words(target)
        packs = _staged(moves.sends, source, from_source=True)
        unpacks = _staged(moves.receives, target, from_source=False)
        self._transport.prepare(packs.counts, unpacks.counts, source.dtype)
        self._staged = packs, unpacks
        self.bytes_sent = 0
        try:
            yield
        finally:
            self._staged = None
            self._transport.release()

    def run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Move one layer's blocks from every rank's `source` view to every rank's `target`."""
        assert self._staged is not None, "run() outside staging()"
        source, target = _words(source), _words(target)
        packs, unpacks = self._staged
        packs.pack(source, self._transport.send)
        unpacks.unpack(self._transport.swap(), target)
        self._transport.done()
        self.bytes_sent += self._transport.send.nbytes

    def measure(self, num_bytes: int, repeats: int = 3) -> float:
        """Bytes per second, over all ranks, when each of them sends `num_bytes` to each."""
        ranks = dist.get_world_size(self._group)
        memory = torch.ones(num_bytes * ranks, dtype=torch.uint8, device=self._device)
        best = float("inf")
        for _ in range(repeats):
            self._transport.prepare([num_bytes] * ranks, [num_bytes] * ranks, memory.dtype)
            dist.barrier(self._group)
            start = time.perf_counter()
            self._transport.send.copy_(memory)
            for part, into in zip(self._transport.swap(), memory.split(num_bytes), strict=True):
                into.copy_(part)
            self._transport.done()
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            best = min(best, time.perf_counter() - start)
        self._transport.release()
        return ranks * memory.nbytes / best


def _words(view: torch.Tensor) -> torch.Tensor:
    """The same bytes in 8-byte elements, which are copied faster than narrow ones."""
    return view.view(torch.int64)

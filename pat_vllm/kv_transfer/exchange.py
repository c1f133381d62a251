"""The collective that moves KV bytes between ranks: pack, swap, unpack."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

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
        """What each rank has packed for this one; flat, valid until `done`."""
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


@dataclass(frozen=True)
class _Piece:
    """One block move on this rank: which part of a view, and where in its peer's part.

    `blocks` is an int64 tensor, or a slice where block ids are consecutive; `shape` is [blocks,
    heads, tokens, content].
    """

    blocks: torch.Tensor | slice
    heads: range
    start: int
    shape: tuple[int, int, int, int]

    @property
    def end(self) -> int:
        blocks, heads, tokens, content = self.shape
        return self.start + blocks * heads * tokens * content

    def pack(self, view: torch.Tensor, part: torch.Tensor) -> None:
        """Copy from the blocks of `view` to the staged bytes."""
        heads, staged = self._heads(view), self._staged(part)
        if isinstance(self.blocks, slice):
            staged.copy_(heads[self.blocks])
        else:
            torch.index_select(heads, 0, self.blocks, out=staged)

    def unpack(self, part: torch.Tensor, view: torch.Tensor) -> None:
        """Copy from the staged bytes to the blocks of `view`."""
        heads, staged = self._heads(view), self._staged(part)
        if isinstance(self.blocks, slice):
            heads[self.blocks].copy_(staged)
        else:
            heads.index_copy_(0, self.blocks, staged)

    def _heads(self, view: torch.Tensor) -> torch.Tensor:
        return view.narrow(1, self.heads.start, len(self.heads))

    def _staged(self, part: torch.Tensor) -> torch.Tensor:
        return part[self.start : self.end].view(self.shape)


@dataclass(frozen=True)
class _Pieces:
    """The pieces that go to, or come from, each rank."""

    by_peer: tuple[tuple[_Piece, ...], ...]

    @classmethod
    def of(
        cls,
        moves_by_peer: tuple[tuple[BlockMove, ...], ...],
        view: torch.Tensor,
        from_source: bool,
    ) -> _Pieces:
        tokens, content = view.shape[2:]
        by_peer = []
        for moves in moves_by_peer:
            pieces: list[_Piece] = []
            for move in moves:
                blocks = move.source_blocks if from_source else move.target_blocks
                heads = move.route.source_heads if from_source else move.route.target_heads
                pieces.append(
                    _Piece(
                        _index(blocks, view.device),
                        heads,
                        pieces[-1].end if pieces else 0,
                        (len(blocks), len(heads), tokens, content),
                    )
                )
            by_peer.append(tuple(pieces))
        return cls(tuple(by_peer))

    @property
    def counts(self) -> list[int]:
        """Elements by rank."""
        return [pieces[-1].end if pieces else 0 for pieces in self.by_peer]


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
        self._staged: tuple[_Pieces, _Pieces] | None = None
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
        packs = _Pieces.of(moves.sends, source, from_source=True)
        unpacks = _Pieces.of(moves.receives, target, from_source=False)
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
        send = self._transport.send
        for pieces, part in zip(packs.by_peer, send.split(packs.counts), strict=True):
            for piece in pieces:
                piece.pack(source, part)
        for pieces, part in zip(unpacks.by_peer, self._transport.swap(), strict=True):
            for piece in pieces:
                piece.unpack(part, target)
        self._transport.done()
        self.bytes_sent += send.nbytes

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


def _index(blocks: Sequence[int], device: torch.device) -> torch.Tensor | slice:
    """`blocks` as an index. A fresh pool gives consecutive ones, which copy without a lookup."""
    first, count = blocks[0], len(blocks)
    if blocks[-1] - first == count - 1 and list(blocks) == list(range(first, first + count)):
        return slice(first, first + count)
    return torch.tensor(blocks, dtype=torch.int64, device=device)

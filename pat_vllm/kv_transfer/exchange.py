"""The collective that moves KV bytes between ranks: pack, exchange, unpack, layer by layer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from pat_vllm.kernels.kv import StagedBlocks, staged_blocks
from pat_vllm.kv_transfer.plan import ROUNDS, RankMoves
from pat_vllm.kv_transfer.shared_memory import SharedMemoryTransport


class Transport(Protocol):
    """Takes packed bytes from every rank to every rank. All ranks make all calls alike.

    For each layer: pack into `send`, `begin`, and later, in the same order, `finish`, unpack what
    it returns, `done`. Up to `depth` layers may have begun and not be done.
    """

    depth: int
    """Fixed from `prepare` to `release`."""
    receives: bool
    """Whether it has buffers for what arrives, beside those for what is sent."""
    send: torch.Tensor
    """Flat buffer in which the next layer's parts for rank 0, 1, ... follow each other."""

    def prepare(
        self,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        dtype: torch.dtype,
        room: int,
    ) -> None:
        """Make room for parts of these sizes (elements, by rank).

        May be called again for other sizes, when no layer is under way.

        Args:
            room: bytes that buffers for several layers may take; those for one take what they need.
        """
        ...

    def begin(self) -> None:
        """`send` is packed: its parts may go to their ranks."""
        ...

    def finish(self) -> list[torch.Tensor]:
        """What each rank has packed for this one; flat, valid until `done`.

        On CUDA, consecutive parts of one buffer.
        """
        ...

    def done(self) -> None:
        """The parts have been read; their memory may be used again."""
        ...

    def release(self) -> None:
        """Give large buffers back."""
        ...


class CollectiveTransport:
    """A `Transport` over `torch.distributed`, for any device and any number of hosts.

    Two sets of buffers, if there is room: while one layer is under way, the next is packed. On
    CUDA, NCCL works on a stream of its own, so that the two overlap there.
    """

    receives = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.depth = 2
        self._group = group
        self._device = device
        # NCCL takes its memory at its first call. Make it now, before vLLM counts what is left.
        _meet(group, device)
        self._send_counts: list[int] = []
        self._receive_counts: list[int] = []
        self._kept: dict[tuple[int, int], torch.Tensor] = {}
        self._free: deque[tuple[torch.Tensor, ...]] = deque()
        self._under_way: deque[tuple[Any, tuple[torch.Tensor, ...]]] = deque()
        self.release()

    def prepare(
        self,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        dtype: torch.dtype,
        room: int,
    ) -> None:
        self._send_counts, self._receive_counts = list(send_counts), list(receive_counts)
        num_bytes = (sum(send_counts) + sum(receive_counts)) * dtype.itemsize
        # Ranks may differ in it: each exchanges one layer after the other in any case.
        self.depth = 2 if 2 * num_bytes <= room else 1
        self._free = deque(
            tuple(
                self._buffer((place, side), sum(counts), dtype)
                for side, counts in enumerate((send_counts, receive_counts))
            )
            for place in range(self.depth)
        )
        self.send = self._free[0][0]

    def _buffer(self, name: tuple[int, int], size: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer, the same one for smaller sizes: a new one would lie beside the old one, which
        torch keeps until the device has done with it."""
        kept = self._kept.get(name)
        if kept is None or kept.dtype != dtype or len(kept) < size:
            self._kept[name] = kept = torch.empty(size, dtype=dtype, device=self._device)
        return kept[:size]

    def begin(self) -> None:
        buffers = self._free.popleft()
        send, receive = buffers
        work = dist.all_to_all_single(
            receive, send, self._receive_counts, self._send_counts, self._group, async_op=True
        )
        self._under_way.append((work, buffers))
        if self._free:
            self.send = self._free[0][0]

    def finish(self) -> list[torch.Tensor]:
        work, (_, receive) = self._under_way[0]
        work.wait()
        return list(receive.split(self._receive_counts))

    def done(self) -> None:
        _, buffers = self._under_way.popleft()
        self._free.append(buffers)
        self.send = self._free[0][0]

    def release(self) -> None:
        self.send = torch.empty(0, device=self._device)
        self._kept.clear()
        self._free.clear()
        self._under_way.clear()


def best_transport(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Shared memory for CPU ranks of one host, else `torch.distributed`. Every rank calls it."""
    shared = SharedMemoryTransport.connect(group) if device.type == "cpu" else None
    return shared or CollectiveTransport(group, device)


class Part(NamedTuple):
    """Moves between blocks of one shape, which are alike in all layers that have some.

    Attributes:
        moves: this rank's part of the plan.
        source, target: views of one layer in the two layouts, [blocks, heads, tokens, content],
            which tell the sizes.
    """

    moves: RankMoves
    source: torch.Tensor
    target: torch.Tensor

    def staged(self) -> tuple[StagedBlocks, StagedBlocks]:
        """What is packed from the source's view for each rank, and what is unpacked from each rank
        to the target's view; blocks and heads in the plan's order."""
        sends = [
            [(move.source_blocks, move.route.source_heads) for move in to]
            for to in self.moves.sends
        ]
        receives = [
            [(move.target_blocks, move.route.target_heads) for move in by]
            for by in self.moves.receives
        ]
        return staged_blocks(sends, self.source), staged_blocks(receives, self.target)


class Exchange:
    """All-to-all of KV blocks over the ranks of a process group. Every rank makes every call.

    Attributes:
        bytes_sent: KV bytes that this rank has packed since it was set to 0, those that it keeps
            included.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, transport: Transport | None = None
    ) -> None:
        self._group = group
        self._device = device
        self._transport = transport or best_transport(group, device)
        self._staged: tuple[StagedBlocks, StagedBlocks] | None = None
        self._rounds: list[tuple[int, StagedBlocks, StagedBlocks]] = []
        self._packed = torch.empty(0)
        self._begun: deque[torch.Tensor] = deque()
        self.bytes_sent = 0

    @contextmanager
    def staging(self, parts: Sequence[Part]) -> Iterator[None]:
        """Stage the same moves for any number of regions. At the end all of them have arrived.

        A region is the memory of a layer, or of one layer each of several KV cache groups. There is
        a part for each shape of block in it.

        Staging takes the bytes of one layer's moves. A transport that does not share memory takes
        them in both directions, and for two layers where the moves are a small part of a layer.
        Where they are a large part, what arrives is staged round by round. Bytes that stay on their
        rank are staged, too, because both views lie over the same memory.
        """
        parts = [Part(part.moves, _words(part.source), _words(part.target)) for part in parts]
        # For a layer there is always room, and for a round in each direction (`staged_share` in
        # start/memory_estimate.py).
        layer = max(view.nbytes for part in parts for view in (part.source, part.target))
        room = layer + 2 * layer // ROUNDS
        staged = sum(part.moves.most_staged * part.source[0, 0].nbytes for part in parts)
        large = staged > room and self._transport.receives
        if large or len(parts) > 1:
            self._prepare_rounds(parts, ROUNDS if large else 1)
        else:
            (part,) = parts
            packs, unpacks = part.staged()
            self._transport.prepare(packs.counts, unpacks.counts, part.source.dtype, room=room)
            self._staged = packs, unpacks
        try:
            yield
            while self._begun:
                self._finish_one()
        finally:
            self._staged = None
            self._rounds.clear()
            self._packed = torch.empty(0)
            self._begun.clear()
            self._transport.release()

    def _prepare_rounds(self, parts: Sequence[Part], rounds: int) -> None:
        """Split the moves into rounds. Take memory for all that a region sends, and for a round."""
        self._rounds = [
            (index, *part._replace(moves=moves).staged())
            for index, part in enumerate(parts)
            for moves in part.moves.split(rounds)
        ]
        # The largest round first, so that the buffers fit every other.
        send = _largest([packs.counts for _, packs, _ in self._rounds])
        receive = _largest([unpacks.counts for _, _, unpacks in self._rounds])
        dtype = parts[0].source.dtype
        self._transport.prepare(send, receive, dtype, room=0)
        total = sum(sum(packs.counts) for _, packs, _ in self._rounds)
        self._packed = torch.empty(total, dtype=dtype, device=self._device)

    def run(self, views: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Move the blocks of one region between every rank's views of it.

        It may return before they have arrived. Regions must not lie over each other.

        Args:
            views: the source's and the target's of each part.
        """
        if self._rounds:
            self._run_rounds([(_words(source), _words(target)) for source, target in views])
            return
        assert self._staged is not None, "run() outside staging()"
        ((source, target),) = views
        packs, _ = self._staged
        packs.pack(_words(source), self._transport.send)
        self.bytes_sent += self._transport.send.nbytes
        self._transport.begin()
        self._begun.append(_words(target))
        if len(self._begun) == self._transport.depth:
            self._finish_one()

    def _run_rounds(self, views: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Pack all of a region, and only then let parts of it arrive."""
        packed = self._packed.split([sum(packs.counts) for _, packs, _ in self._rounds])
        for (index, packs, _), part in zip(self._rounds, packed, strict=True):
            packs.pack(views[index][0], part)
        for (index, packs, unpacks), part in zip(self._rounds, packed, strict=True):
            self._transport.prepare(packs.counts, unpacks.counts, part.dtype, room=0)
            self._transport.send.copy_(part)
            self._transport.begin()
            unpacks.unpack(self._transport.finish(), views[index][1])
            self._transport.done()
            self.bytes_sent += part.nbytes

    def _finish_one(self) -> None:
        assert self._staged is not None
        _, unpacks = self._staged
        unpacks.unpack(self._transport.finish(), self._begun.popleft())
        self._transport.done()

    def measure(self, num_bytes: int, repeats: int = 3) -> float:
        """Bytes per second, over all ranks, when each of them sends `num_bytes` to each."""
        ranks = dist.get_world_size(self._group)
        memory = torch.ones(num_bytes * ranks, dtype=torch.uint8, device=self._device)
        best = float("inf")
        for _ in range(repeats):
            counts = [num_bytes] * ranks
            self._transport.prepare(counts, counts, memory.dtype, room=0)
            _meet(self._group, self._device)
            self._synchronize()
            start = time.perf_counter()
            self._transport.send.copy_(memory)
            self._transport.begin()
            for part, into in zip(self._transport.finish(), memory.split(num_bytes), strict=True):
                into.copy_(part)
            self._transport.done()
            self._synchronize()
            best = min(best, time.perf_counter() - start)
        self._transport.release()
        return ranks * memory.nbytes / best

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait for all ranks by a call of the kind that moves KV.

    NCCL takes more memory for the first of another kind; and for a barrier torch may choose the
    device by the rank.
    """
    one_each = torch.zeros(dist.get_world_size(group), device=device)
    dist.all_to_all_single(torch.empty_like(one_each), one_each, group=group)


def _largest(counts: Sequence[Sequence[int]]) -> list[int]:
    """The largest count of each peer."""
    return [max(of_peer) for of_peer in zip(*counts, strict=True)]


def _words(view: torch.Tensor) -> torch.Tensor:
    """The same bytes in 8-byte elements, which are copied faster than narrow ones."""
    return view.view(torch.int64)

"""The collective that moves KV bytes between ranks: pack, all-to-all, unpack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pat_vllm.kv_transfer.plan import BlockMove, RankMoves


@dataclass(frozen=True)
class _Piece:
    """One block move on this rank: which part of a view, and where in the staging buffer.

    `blocks` is an int64 tensor; `shape` is [blocks, heads, tokens, content].
    """

    blocks: torch.Tensor
    heads: range
    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + self.blocks.numel() * len(self.heads) * self.shape[2] * self.shape[3]

    def of(self, view: torch.Tensor) -> torch.Tensor:
        """The heads of `view` that move: [all blocks, heads, tokens, content]."""
        return view.narrow(1, self.heads.start, len(self.heads))

    def staged(self, buffer: torch.Tensor) -> torch.Tensor:
        """This move's part of a staging buffer, shaped as the blocks."""
        return buffer[self.start : self.end].view(self.shape)


@dataclass
class _Staging:
    """Buffers for one layer's moves, and what is in them."""

    packs: list[_Piece]
    unpacks: list[_Piece]
    send: torch.Tensor
    receive: torch.Tensor
    send_counts: list[int]
    receive_counts: list[int]


class Exchange:
    """All-to-all of KV blocks over the ranks of a process group. Every rank makes every call.

    Attributes:
        bytes_sent: KV bytes that this rank has packed since the last `staging`, those that it
            keeps included.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._rank = dist.get_rank(group)
        self._staging: _Staging | None = None
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

        Staging takes the bytes of one layer's moves twice: packed and received. It is needed even
        for bytes that stay on their rank, for both views lie over the same memory.
        """
        packs, send_counts = self._pieces(moves.sends, source, from_source=True)
        unpacks, receive_counts = self._pieces(moves.receives, target, from_source=False)
        self._staging = _Staging(
            packs,
            unpacks,
            torch.empty(sum(send_counts), dtype=source.dtype, device=self._device),
            torch.empty(sum(receive_counts), dtype=target.dtype, device=self._device),
            send_counts,
            receive_counts,
        )
        self.bytes_sent = 0
        try:
            yield
        finally:
            self._staging = None

    def run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Move one layer's blocks from every rank's `source` view to every rank's `target`."""
        staging = self._staging
        assert staging is not None, "run() outside staging()"
        for piece in staging.packs:
            torch.index_select(piece.of(source), 0, piece.blocks, out=piece.staged(staging.send))
        self._all_to_all(staging)
        for piece in staging.unpacks:
            piece.of(target).index_copy_(0, piece.blocks, piece.staged(staging.receive))
        self.bytes_sent += staging.send.nbytes

    def measure(self, num_bytes: int, repeats: int = 3) -> float:
        """Bytes per second of an all-to-all in which each rank sends `num_bytes` to each."""
        import time

        peers = dist.get_world_size(self._group)
        send = torch.ones(num_bytes * peers, dtype=torch.uint8, device=self._device)
        staging = _Staging(
            [], [], send, torch.empty_like(send), [num_bytes] * peers, [num_bytes] * peers
        )
        best = float("inf")
        for _ in range(repeats):
            dist.barrier(self._group)
            start = time.perf_counter()
            staging.send.copy_(staging.receive)  # stands for packing
            self._all_to_all(staging)
            staging.send.copy_(staging.receive)  # and for unpacking
            self._synchronize()
            best = min(best, time.perf_counter() - start)
        return send.nbytes / best

    def _pieces(
        self,
        moves_by_peer: tuple[tuple[BlockMove, ...], ...],
        view: torch.Tensor,
        from_source: bool,
    ) -> tuple[list[_Piece], list[int]]:
        tokens, content = view.shape[2:]
        pieces: list[_Piece] = []
        counts: list[int] = []
        start = 0
        for moves in moves_by_peer:
            before = start
            for move in moves:
                blocks = move.source_blocks if from_source else move.target_blocks
                heads = move.route.source_heads if from_source else move.route.target_heads
                piece = _Piece(
                    torch.tensor(blocks, dtype=torch.int64, device=self._device),
                    heads,
                    start,
                    (len(blocks), len(heads), tokens, content),
                )
                pieces.append(piece)
                start = piece.end
            counts.append(start - before)
        return pieces, counts

    def _all_to_all(self, staging: _Staging) -> None:
        dist.all_to_all_single(
            staging.receive,
            staging.send,
            staging.receive_counts,
            staging.send_counts,
            group=self._group,
        )

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

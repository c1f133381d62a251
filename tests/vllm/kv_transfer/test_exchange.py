"""The KV exchange against a reference that copies from a snapshot of every rank's memory."""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pat_vllm.kv_transfer import shared_memory
from pat_vllm.kv_transfer.exchange import CollectiveTransport, Exchange, Part
from pat_vllm.kv_transfer.plan import ROUNDS, BlockMove, RankMoves, RequestBlocks, plan_moves
from pat_vllm.kv_transfer.shared_memory import SharedMemoryTransport
from pat_vllm.layout import Layout
from pat_vllm.models.kinds import SlidingWindow
from tests.support import kinds
from tests.support.child import Child
from tests.support.fork_server import preload
from tests.unit.kv_transfer import test_rounds as full

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
TOKENS, CONTENT, BLOCKS, LAYERS = 4, 16, 12, 3
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)

Case = tuple[Layout, Layout, int, torch.dtype, bool, list[BlockMove]]
Views = list[torch.Tensor]
ViewsOf = Callable[[torch.Tensor], Views]
Shape = tuple[Sequence[BlockMove], ViewsOf, ViewsOf]
"""Moves of blocks of one shape, and the views of a buffer in the two layouts."""
Result = tuple[list[str], int]
"""What is wrong, and the bytes of a layer that were staged to be sent."""


def _world() -> Any:
    return dist.group.WORLD


def _run_ranks(
    function: Callable[..., None], world_size: int, tmp_path: Path, *args: Any, join: bool = True
) -> Any:
    # Ranks are forks of one process that has imported torch, which takes each of them seconds.
    preload()
    return mp.start_processes(
        _rank_main,
        (function, world_size, f"file://{tmp_path}/rendezvous", *args),
        nprocs=world_size,
        join=join,
        start_method="forkserver",
    )


def _rank_main(
    rank: int, function: Callable[..., None], world_size: int, address: str, *args: Any
) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    function(rank, world_size, *args)
    dist.barrier()
    dist.destroy_process_group()


def _random_case(seed: int, world_size: int) -> Case:
    """Two layouts, their KV heads, and requests with random blocks. The same on every rank."""
    rng = random.Random(seed)
    sizes = [tp for tp in range(1, world_size + 1) if world_size % tp == 0]
    source, target = (Layout.of(rng.choice(sizes), world_size) for _ in range(2))
    num_kv_heads = rng.choice([1, 2, 4, 8])

    def pools(layout: Layout) -> list[Any]:
        blocks = _num_blocks(layout, num_kv_heads)
        ids = [rng.sample(range(1, blocks), blocks - 1) for _ in range(layout.replicas)]
        # A fresh pool hands out consecutive ids, a used one any.
        return [iter(sorted(pool) if rng.random() < 0.5 else pool) for pool in ids]

    source_pools, target_pools = pools(source), pools(target)
    requests = []
    for index in range(rng.randrange(6)):
        a, b, count = rng.randrange(source.replicas), rng.randrange(target.replicas), 2
        blocks = list(itertools.islice(source_pools[a], count))
        places = list(itertools.islice(target_pools[b], count))
        if len(blocks) == len(places) == count:
            requests.append(RequestBlocks(f"r{index}", a, tuple(blocks), b, tuple(places)))
    moves = plan_moves(source, target, kinds.full(num_kv_heads), requests)
    return source, target, num_kv_heads, rng.choice(DTYPES), rng.random() < 0.5, moves


def _num_blocks(layout: Layout, num_kv_heads: int) -> int:
    """Blocks of a layout over the bytes of `BLOCKS` blocks with all KV heads."""
    return BLOCKS * num_kv_heads // layout.kv_heads_per_rank(num_kv_heads)


def _views(
    buffer: torch.Tensor, layout: Layout, num_kv_heads: int, dtype: torch.dtype, heads_first: bool
) -> Views:
    """The layers of one buffer as a layout sees them: [blocks, heads, tokens, content]."""
    heads, blocks = layout.kv_heads_per_rank(num_kv_heads), _num_blocks(layout, num_kv_heads)
    layers = buffer.view(dtype).view(LAYERS, -1)
    if heads_first:
        return [layer.view(blocks, heads, TOKENS, CONTENT) for layer in layers]
    return [layer.view(blocks, TOKENS, heads, CONTENT).transpose(1, 2) for layer in layers]


def _copy(move: BlockMove, old: Views, new: Views) -> None:
    for layer_old, layer_new in zip(old, new, strict=True):
        for a, b in zip(move.source_blocks, move.target_blocks, strict=True):
            for ha, hb in zip(move.route.source_heads, move.route.target_heads, strict=True):
                layer_new[b, hb] = layer_old[a, ha]


def _exchange(
    exchange: Exchange,
    size: int,
    seed: int,
    shapes: Sequence[Shape],
    device: torch.device = CPU,
) -> Result:
    """Move blocks in a buffer of random bytes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    buffer = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    buffer = buffer.to(device)
    buffers = [torch.empty_like(buffer) for _ in range(world_size)]
    dist.all_gather(buffers, buffer)
    expected = buffer.clone()
    parts, views, sent = [], [], 0
    for moves, source, target in shapes:
        snapshot, new = [source(gathered) for gathered in buffers], target(expected)
        for move in moves:
            if move.route.target_rank == rank:
                _copy(move, snapshot[move.route.source_rank], new)
        old_views, new_views = source(buffer), target(buffer)
        parts.append(Part(RankMoves.of(rank, world_size, moves), old_views[0], new_views[0]))
        views.append((old_views, new_views))
        sent += sum(
            LAYERS * len(m.source_blocks) * len(m.route.source_heads) * old_views[0][0, 0].nbytes
            for m in moves
            if m.route.source_rank == rank
        )

    exchange.bytes_sent = 0
    with exchange.staging(parts):
        for layer in range(LAYERS):
            exchange.run([(old[layer], new[layer]) for old, new in views])
        staged = exchange._packed.nbytes
    wrong = {
        "bytes": not torch.equal(buffer, expected),
        "count": exchange.bytes_sent != sent,
        "kept": exchange._packed.numel() != 0,
    }
    return [name for name, is_wrong in wrong.items() if is_wrong], staged


def _exchange_random_cases(
    rank: int, world_size: int, transport: Any, cases: int = 30, device: torch.device = CPU
) -> None:
    exchange = Exchange(_world(), device, transport)
    moved = 0
    for seed in range(cases):
        source, target, num_kv_heads, dtype, heads_first, moves = _random_case(seed, world_size)
        size = LAYERS * BLOCKS * num_kv_heads * TOKENS * CONTENT * dtype.itemsize
        shape = (num_kv_heads, dtype, heads_first)
        old, new = (
            lambda b, layout=layout, shape=shape: _views(b, layout, *shape)
            for layout in (source, target)
        )
        wrong, _ = _exchange(exchange, size, seed, [(moves, old, new)], device)
        assert not wrong, f"case {seed}, {source} -> {target}: {wrong}"
        moved += exchange.bytes_sent
    assert moved > 0


def _exchange_groups(rank: int, world_size: int) -> None:
    """Groups whose blocks have several shapes and lie over each other, in each order of layouts.

    In rounds and not; what a group does not have blocks of, it does not touch.
    """
    heads, content = (2, 4), (32, 16)
    of_groups = (*kinds.full(2), SlidingWindow(4, 16, window=24), SlidingWindow(4, 16, window=40))
    shapes = (0, 1, 1)

    def views(layout: Layout, shape: int) -> ViewsOf:
        size = BLOCKS * layout.tp, heads[shape] // layout.tp, TOKENS, content[shape]
        return lambda b: [layer.view(size) for layer in b.view(torch.float32).view(LAYERS, -1)]

    for seed, transport in itertools.product(range(12), (None, CollectiveTransport(_world(), CPU))):
        rng = random.Random(seed)
        source, target = (Layout.of(rng.choice([1, 2]), world_size) for _ in range(2))
        pools = [
            [iter(rng.sample(range(1, BLOCKS * layout.tp), BLOCKS * layout.tp - 1))
             for _ in range(layout.replicas)]
            for layout in (source, target)
        ]  # fmt: skip
        requests = []
        for i in range(rng.choice([2, 3])):
            a, b, tokens = i % source.replicas, i % target.replicas, rng.choice([10, 40, 70])
            for group, kind in enumerate(of_groups):
                places = [tuple(itertools.islice(pools[0][a], len(kind.held(tokens)))),
                          tuple(itertools.islice(pools[1][b], len(kind.held(tokens))))]  # fmt: skip
                if len(places[0]) == len(places[1]):
                    requests.append(RequestBlocks(f"{i}", a, places[0], b, places[1], group))
        moves = plan_moves(source, target, of_groups, requests)

        of_shapes = [
            ([m for m in moves if shapes[m.group] == s], views(source, s), views(target, s))
            for s in (0, 1)
        ]
        size = LAYERS * BLOCKS * 64 * TOKENS * 4
        wrong, _ = _exchange(Exchange(_world(), CPU, transport), size, seed, of_shapes)
        assert not wrong, (seed, source, target, wrong)


def test_groups_with_blocks_of_several_shapes(tmp_path: Path) -> None:
    _run_ranks(_exchange_groups, 2, tmp_path)


class _WithRoom(CollectiveTransport):
    """Has other room for buffers than it is told."""

    def __init__(self, room: int) -> None:
        super().__init__(_world(), CPU)
        self._room = room

    def prepare(self, send_counts: Any, receive_counts: Any, dtype: Any, room: int) -> None:
        super().prepare(send_counts, receive_counts, dtype, self._room)
        assert self.depth == (1 if self._room < 0 else 2)


def _exchange_over_each_transport(rank: int, world_size: int) -> None:
    shared = SharedMemoryTransport.connect(_world())
    assert shared is not None, "ranks of one host share memory"
    collective = CollectiveTransport(_world(), CPU)
    _exchange_random_cases(rank, world_size, collective)
    # A rank without room for two layers, beside others that have it.
    _exchange_random_cases(rank, world_size, _WithRoom(-1 if rank == 1 else 1 << 30))
    _exchange_random_cases(rank, world_size, shared)
    # Once more with memory that is given back each time: less is kept than most cases need.
    shared_memory._KEPT_BYTES = 100
    _exchange_random_cases(rank, world_size, shared)
    for transport in (shared, collective):
        exchange = Exchange(_world(), CPU, transport)
        assert exchange.measure(1 << 16) > 0 < exchange.measure(1 << 10)


@pytest.mark.parametrize("world_size", [2, 4])
def test_an_exchange_writes_what_the_plan_says_and_nothing_else(
    world_size: int, tmp_path: Path
) -> None:
    _run_ranks(_exchange_over_each_transport, world_size, tmp_path)


def test_a_rank_alone_exchanges_with_itself(tmp_path: Path) -> None:
    """The program that `tests/gpu` runs over NCCL."""
    program = ["-m", "tests.support.one_rank", "gloo", "cpu", f"file://{tmp_path}/rendezvous"]
    child = Child([sys.executable, *program], tmp_path / "log", cwd=ROOT)
    try:
        assert child.wait() == 0, child.tail()
    finally:
        child.kill()


# -------------------------------------------------------------------- switches in rounds


class _Watched(CollectiveTransport):
    """Knows how much memory its buffers have had at most."""

    def __init__(self) -> None:
        super().__init__(_world(), CPU)
        self.most = 0

    def begin(self) -> None:
        super().begin()
        self.most = max(self.most, sum(buffer.nbytes for buffer in self._kept.values()))


def _check_switch(source: Layout, target: Layout, seed: int, share: float) -> bool:
    """Every byte arrives, and staging stays within what is kept free. Whether rounds were made."""
    moves = full.full_switch(source, target, seed, share)
    cell = TOKENS * CONTENT * 4
    layer = full.BLOCKS * full.KV_HEADS * cell

    def views(layout: Layout) -> ViewsOf:
        shape = full.num_blocks(layout), layout.kv_heads_per_rank(full.KV_HEADS), TOKENS, CONTENT
        return lambda b: [
            of_layer.view(shape) for of_layer in b.view(torch.float32).view(LAYERS, -1)
        ]

    transport = _Watched()
    exchange = Exchange(_world(), CPU, transport)
    wrong, staged = _exchange(
        exchange, LAYERS * layer, seed, [(moves, views(source), views(target))]
    )
    if transport._kept:
        wrong.append("buffers are kept")
    # A round may have a block more of each move than its share.
    slack = 2 * sum(len(move.route.source_heads) * cell for move in moves)
    if staged + transport.most > layer * (1 + 2 / ROUNDS) + slack:
        wrong.append("staging")
    # All ranks go on, whatever one has seen, so that none waits for another.
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (wrong, bool(staged)))
    assert not any(problems for problems, _ in of_ranks), of_ranks
    assert len({in_rounds for _, in_rounds in of_ranks}) == 1, (
        "some ranks exchange in rounds, and some do not"
    )
    return bool(staged)


def _switches(rank: int, world_size: int) -> None:
    layouts = [Layout.of(tp, world_size) for tp in (1, 2, 4)]
    for seed, (source, target) in enumerate(itertools.permutations(layouts, 2)):
        assert _check_switch(source, target, seed, share=1.0)
        assert not _check_switch(source, target, seed, share=0.3)


def test_full_switches_arrive_in_rounds(tmp_path: Path) -> None:
    _run_ranks(_switches, full.RANKS, tmp_path)


# -------------------------------------------------------------------- shared memory


def test_others_see_the_last_barrier_while_a_rank_makes_room() -> None:
    own = shared_memory._Segment.create()
    assert own is not None
    seen = shared_memory._Segment.attach(own.address)
    assert seen is not None
    for size in (100, 0, 1 << 20, 5 << 20, 0, 7):
        own.header[0] = 0x0102030405060708
        own.resize(size)
        assert seen.header[0] == 0x0102030405060708
        seen.follow()
        assert seen.header[0] == 0x0102030405060708
        assert len(seen.part(0, size)) == size


def test_a_file_of_the_same_path_on_another_host_is_not_opened() -> None:
    segment = shared_memory._Segment.create()
    assert segment is not None
    path, _ = segment.address.split()
    assert shared_memory._Segment.attach(segment.address) is not None
    assert shared_memory._Segment.attach(f"{path} pat-kv-of-another-host") is None
    assert shared_memory._Segment.attach("/proc/1/fd/9999 pat-kv-none") is None


def _unreachable(rank: int, world_size: int) -> None:
    if rank == 1:  # as if it ran on another host
        setattr(shared_memory._Segment, "attach", lambda address: None)  # noqa: B010
    assert SharedMemoryTransport.connect(_world()) is None


def test_ranks_agree_not_to_share_memory_when_one_cannot(tmp_path: Path) -> None:
    _run_ranks(_unreachable, 2, tmp_path)


def _wait_for_ever(rank: int, world_size: int, pids: str) -> None:
    transport = SharedMemoryTransport.connect(_world())
    assert transport is not None
    counts = [1 << 20] * world_size
    transport.prepare(counts, counts, torch.uint8, room=0)
    (Path(pids) / f"{rank}.pid").write_text(str(os.getpid()))
    if rank == 0:
        dist.barrier()  # the test kills this rank here
    shared_memory._TIMEOUT_SECONDS = 2.0
    transport.begin()


def test_a_killed_rank_is_noticed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    context = _run_ranks(_wait_for_ever, 2, tmp_path, str(tmp_path), join=False)
    victim = tmp_path / "0.pid"
    while not (victim.exists() and victim.read_text() and (tmp_path / "1.pid").exists()):
        context.join(timeout=0.1)
    os.kill(int(victim.read_text()), signal.SIGKILL)
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        while not context.join(timeout=10):
            pass
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "pat" in name]

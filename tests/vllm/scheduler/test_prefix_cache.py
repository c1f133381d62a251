"""Prefix caches at switches: what is carried is what its hash says, found again, and costs nobody.

Without workers: a model of their memory follows what the schedulers and the switches' plans say.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.layout import Layout
from pat_vllm.models import kinds
from pat_vllm.models.kinds import NULL_BLOCK
from pat_vllm.scheduler.switching.prefix_cache import find, num_cached
from tests.support.kinds import LaterHalf
from tests.vllm.scheduler.later_half import LaterHalfSpec
from tests.vllm.scheduler.test_scheduler import results_of
from tests.vllm.without_workers import BLOCK_SIZE, EXECUTOR, pat_scheduler, spec
from tests.vllm.without_workers import request_of as request

HEADS = 8
TPS = (1, 2, 4, 8)
FEW = 10
"""Blocks of a replica of tp=1, one of which vLLM takes; of tp=8 eight times as many."""


class Memory:
    """What each rank's blocks hold.

    Attributes:
        cells: (rank, block, head of it) -> (group, hash of the block, head).
        hits: tokens that each request found cached when it was first scheduled.
    """

    def __init__(self, scheduler: Any) -> None:
        self.cells: dict[tuple[int, int, int], tuple[int, Any, int]] = {}
        self.hits: dict[str, int] = {}
        self._scheduler = scheduler

    def step(self) -> None:
        """A step is scheduled, and computes; then its outputs come."""
        output = self._scheduler.schedule()
        layout = self._scheduler.replica_set.layout
        for replica in self._scheduler.replica_set.replicas:
            for request_ in replica.scheduler.running:
                if (stats := request_.prefill_stats) is not None:
                    self.hits[request_.request_id] = stats.num_local_cached_tokens
                of_groups = replica.scheduler.kv_cache_manager.get_block_ids(request_.request_id)
                full = request_.num_computed_tokens // BLOCK_SIZE
                for group, ids in enumerate(of_groups):
                    for block, block_hash in zip(ids, request_.block_hashes[:full], strict=False):
                        for rank in layout.ranks_of(replica.index) if block else ():
                            for local, head in enumerate(held_by(layout, rank)):
                                self.cells[rank, block, local] = group, block_hash, head
        self._scheduler.update_from_output(output, results_of(output))

    def switch(self, command: SwitchCommand) -> None:
        """What does not move is lost: the other layout's blocks lie over these."""
        after: dict[tuple[int, int, int], tuple[int, Any, int]] = {}
        written = set()
        for move in command.moves:
            route = move.route
            for a, b in zip(move.source_blocks, move.target_blocks, strict=True):
                for i, j in zip(route.source_heads, route.target_heads, strict=True):
                    to = route.target_rank, b, j
                    assert to not in written, "written twice"
                    written.add(to)
                    assert a and b, "a null block"
                    if (held := self.cells.get((route.source_rank, a, i))) is not None:
                        after[to] = held
        self.cells = after

    def check(self) -> int:
        """Every hash points to what it says; its predecessors are there; blocks add up.

        Returns:
            Number of cached blocks.
        """
        layout = self._scheduler.replica_set.layout
        total = 0
        for replica in self._scheduler.replica_set.replicas:
            manager = replica.scheduler.kv_cache_manager
            pool = manager.block_pool
            for block in pool.blocks:
                if block.block_hash is None:
                    continue
                total += 1
                of_block = get_group_id(block.block_hash), get_block_hash(block.block_hash)
                assert pool.cached_block_hash_to_block.contain(block.block_hash, block.block_id)
                for rank in layout.ranks_of(replica.index):
                    for local, head in enumerate(held_by(layout, rank)):
                        assert self.cells[rank, block.block_id, local] == (*of_block, head)
            used = {
                id_
                for name in replica.scheduler.requests
                for ids in manager.get_block_ids(name)
                for id_ in ids
            } - {NULL_BLOCK}
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(used)
            assert all((pool.blocks[id_].ref_cnt > 0) for id_ in used)
        return total


FULL, WINDOW = spec(FullAttentionSpec), spec(SlidingWindowSpec, sliding_window=40)
NARROW = spec(SlidingWindowSpec, sliding_window=4)
CHUNKS = spec(ChunkedLocalAttentionSpec, attention_chunk_size=64)
OURS = spec(LaterHalfSpec)
GROUPS = {
    "full": [FULL],
    "windows": [WINDOW],
    "full and windows": [FULL, WINDOW, WINDOW, NARROW],
    "windows and full": [NARROW, FULL],
    "full and chunks": [FULL, CHUNKS],
    "full and a kind of the tests": [FULL, OURS],
}


def held_by(layout: Layout, rank: int) -> range:
    return layout.kv_heads_of(layout.tp_rank_of(rank), HEADS)


@pytest.fixture
def scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of one group, or of those of `GROUPS` that a test is parametrized with; with few blocks."""
    name, _, few = getattr(request, "param", "full").partition(", ")
    groups = GROUPS[name]
    monkeypatch.setattr(kinds, "KINDS", [*kinds.KINDS, LaterHalf])
    blocks = (24 if few else 80) * len(groups)
    scheduler = new_scheduler(monkeypatch, num_blocks=blocks, specs=groups)
    yield scheduler
    scheduler.memory.check()


def new_scheduler(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """For eight ranks, in the layout tp8dp1, with a memory that follows it."""
    scheduler = pat_scheduler(8, **{"num_blocks": 80, **options})
    scheduler.memory = Memory(scheduler)
    scheduler.controller.costs.mode = "migrate"
    make_switch = type(EXECUTOR).switch

    def switch(command: SwitchCommand) -> list[Any]:
        scheduler.memory.switch(command)
        return make_switch(EXECUTOR, command)

    monkeypatch.setattr(EXECUTOR, "switch", switch, raising=False)
    return scheduler


def finish(scheduler: Any, *requests: Request) -> None:
    """Add requests, and run until they have ended."""
    for request_ in requests:
        scheduler.add_request(request_)
    while any(scheduler.has_request(request_.request_id) for request_ in requests):
        scheduler.memory.step()


def tokens_of(seed: int, blocks: float) -> list[int]:
    return random.Random(seed).choices(range(10, 400), k=int(blocks * BLOCK_SIZE))


def cached(scheduler: Any, request: Request) -> list[int]:
    """Blocks that each replica's cache has of a request."""
    return [num_cached(replica, request.block_hashes) for replica in scheduler.replica_set.replicas]


def hits(scheduler: Any, request: Request) -> float:
    """Blocks of its prompt that a request found cached."""
    tokens: int = scheduler.memory.hits[request.request_id]
    return tokens / BLOCK_SIZE


def switch(scheduler: Any, tp: int) -> Any:
    """Switch, and return the report of it."""
    assert scheduler.controller.request_switch(tp)
    report = scheduler.controller.report().switches[-1]
    assert report.target.tp == tp
    scheduler.memory.check()
    return report


def anchor(scheduler: Any) -> Request:
    """A request that keeps the engine from being idle."""
    live = request("anchor", tokens_of(99, 0.5), 4000)
    scheduler.add_request(live)
    scheduler.memory.step()
    return live


# -------------------------------------------------------------------- turns


@pytest.mark.parametrize("scheduler", GROUPS, indirect=True)
@pytest.mark.parametrize("source", TPS)
@pytest.mark.parametrize("target", TPS)
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_the_next_turn_finds_its_prefix(
    scheduler: Any, source: int, target: int, busy: bool
) -> None:
    """In the replica that it goes to, also of an idle engine."""
    if source == target:
        return
    if busy:
        anchor(scheduler)
    assert scheduler.controller.request_switch(source)
    first = [request(f"{i}", tokens_of(i, 2.5), 20) for i in range(6)]
    finish(scheduler, *first)
    report = switch(scheduler, target)
    full = [(turn.num_tokens - 1) // BLOCK_SIZE for turn in first]
    assert full == [3] * 6
    assert report.cached_tokens == 6 * 3 * BLOCK_SIZE
    next_turns = [
        request(f"{i} again", [*turn.all_token_ids, *tokens_of(50 + i, 1)], 4)
        for i, turn in enumerate(first)
    ]
    for turn in next_turns:
        assert max(cached(scheduler, turn)) == 3
        scheduler.add_request(turn)
    scheduler.memory.step()
    assert [hits(scheduler, turn) for turn in next_turns] == [3] * 6
    by_replica = [len(r.scheduler.requests) for r in scheduler.replica_set.replicas]
    assert max(by_replica) - min(by_replica) <= 2 + busy, "chains were not spread"
    finish(scheduler)


def test_equal_prefixes_of_replicas_are_merged(scheduler: Any) -> None:
    anchor(scheduler)
    assert scheduler.controller.request_switch(1)
    common = tokens_of(1, 2)
    own = [request(f"{i}", [*common, *tokens_of(10 + i, 2)], 1) for i in range(24)]
    finish(scheduler, *own)
    holders = [count for count in cached(scheduler, own[0]) if count]
    assert len(holders) > 1, "the prefix is in one replica"
    report = switch(scheduler, 8)
    blocks = {block_hash for request_ in own for block_hash in request_.block_hashes}
    assert 0 < report.cached_tokens <= len(blocks) * BLOCK_SIZE
    for sample in own:
        assert cached(scheduler, sample)[0] in (0, 2, 3, 4)
    assert switch(scheduler, 1).cached_tokens > report.cached_tokens, "copied to several replicas"


def test_a_chain_half_live_and_half_cached(scheduler: Any) -> None:
    """The half that comes with a request is not carried again to the replica of that."""
    anchor(scheduler)
    assert scheduler.controller.request_switch(1)
    common = tokens_of(1, 3)
    ended = request("ended", [*common, *tokens_of(2, 2)], 1)
    finish(scheduler, ended)
    live = request("live", [*common, *tokens_of(3, 1)], 400)
    scheduler.add_request(live)
    scheduler.memory.step()
    assert hits(scheduler, live) == 3
    assert switch(scheduler, 8).cached_tokens == 2 * BLOCK_SIZE
    scheduler.memory.step()
    assert cached(scheduler, ended) == [5]
    scheduler.memory.check()


def test_what_waits_finds_what_was_cached_for_it(scheduler: Any) -> None:
    anchor(scheduler)
    first = request("first", tokens_of(1, 4), 1)
    finish(scheduler, first)
    again = request("again", [*first.all_token_ids, *tokens_of(2, 1)], 4)
    scheduler.add_request(again)
    assert switch(scheduler, 2).cached_tokens == 4 * BLOCK_SIZE
    scheduler.memory.step()
    assert hits(scheduler, again) == 4


def test_salts_are_kept_apart(scheduler: Any) -> None:
    anchor(scheduler)
    tokens = tokens_of(1, 4)
    salted = [request(salt, tokens, 1, salt) for salt in ("pepper", "cumin")]
    finish(scheduler, *salted)
    assert switch(scheduler, 2).cached_tokens == 8 * BLOCK_SIZE
    for salt, expected in (("pepper", 4), ("cumin", 4), ("none", 0)):
        assert max(cached(scheduler, request("", tokens, 1, salt))) == expected
    assert max(cached(scheduler, request("", tokens, 1))) == 0


# -------------------------------------------------------------------- room


def test_live_requests_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cached takes blocks that they leave, and gives them back, the least wanted first."""
    scheduler = new_scheduler(monkeypatch, num_blocks=FEW)
    anchor(scheduler)
    old, new = (request(name, tokens_of(i, 8), 1) for i, name in enumerate(("old", "new")))
    live = [request(f"live {i}", tokens_of(100 + i, 7.5), 3000) for i in range(4)]
    assert scheduler.controller.request_switch(4)
    finish(scheduler, old)
    finish(scheduler, new)
    for request_ in live:
        scheduler.add_request(request_)
    scheduler.memory.step()
    report = switch(scheduler, 8)
    assert report.migrated == report.num_seqs == len(live) + 1
    assert free_hashes(scheduler) == [
        *[None] * (8 * FEW - 1 - 1 - 4 * 8 - 16),
        *reversed(old.block_hashes),
        *reversed(new.block_hashes),
    ]
    while sum(cached(scheduler, old)):
        assert sum(cached(scheduler, new)) == 8
        assert not scheduler.replica_set.replicas[0].scheduler.waiting
        scheduler.memory.step()


def test_no_request_is_preempted_for_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load for which pools are too small goes step by step as if nothing were cached."""

    def preemptions(caches: bool) -> tuple[int, list[list[tuple[int, int]]]]:
        scheduler = new_scheduler(monkeypatch, num_blocks=FEW)
        if not caches:
            monkeypatch.setattr(scheduler.replica_set.chains, "latest", list)
        ended = [request(f"ended {i}", tokens_of(i, 4), 1) for i in range(10)]
        live = [request(f"{i}", tokens_of(100 + i, 2.5), 400) for i in range(20)]
        anchor(scheduler)
        finish(scheduler, *ended)
        for request_ in live:
            scheduler.add_request(request_)
        carried, went = 0, []
        for tp, steps in ((4, 3), (8, 30), (2, 30), (8, 30), (1, 30), (8, 30)):
            for _ in range(steps):
                scheduler.memory.step()
                went.append(
                    [(request_.num_computed_tokens, request_.num_preemptions) for request_ in live]
                )
            carried += switch(scheduler, tp).cached_tokens
        return carried, went

    (none, without), (some, beside) = preemptions(False), preemptions(True)
    assert without == beside
    falls = [
        computed > later
        for row, next_row in pairwise(without)
        for (computed, _), (later, _) in zip(row, next_row, strict=True)
    ]
    assert sum(falls) > 10, "there was room for all"
    assert some > none


def free_hashes(scheduler: Any) -> list[Any]:
    """Of the blocks of the only replica that no request uses, the next one to be used first."""
    (replica,) = scheduler.replica_set.replicas
    queue = replica.scheduler.kv_cache_manager.block_pool.free_block_queue
    keys = [block.block_hash for block in queue.get_all_free_blocks()]
    return [key and get_block_hash(key) for key in keys]


def test_a_target_with_less_room_gets_the_last_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica of tp=1 has room for one chain of 5 blocks, and for the head of another."""
    scheduler = new_scheduler(monkeypatch, num_blocks=FEW)
    anchor(scheduler)
    ended = [request(f"{i}", tokens_of(i, 5), 1) for i in range(12)]
    for request_ in ended:
        finish(scheduler, request_)
    assert [sum(cached(scheduler, request_)) for request_ in ended] == [5] * 12
    switch(scheduler, 1)
    carried = [max(cached(scheduler, request_)) for request_ in ended]
    assert carried[4:] == [5] * 8, "a chain in each replica"
    assert all(0 < blocks <= 4 for blocks in carried[:4]), "and what there is room for beside it"


def test_a_block_that_is_gone_ends_its_chain(scheduler: Any) -> None:
    """Such as one that was evicted: what comes after it could not be found."""
    anchor(scheduler)
    whole, holed = (request(f"{i}", tokens_of(i, 6), 1) for i in range(2))
    finish(scheduler, whole, holed)
    (replica,) = scheduler.replica_set.replicas
    pool = replica.scheduler.kv_cache_manager.block_pool
    (gone,) = find(replica, holed.block_hashes[4:5])
    assert gone is not None
    pool.evict_blocks({gone.block_id})
    assert switch(scheduler, 4).cached_tokens == (6 + 4) * BLOCK_SIZE
    assert (max(cached(scheduler, whole)), max(cached(scheduler, holed))) == (6, 4)


# -------------------------------------------------------------------- what is not carried


def test_nothing_survives_a_reset_or_new_weights(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = anchor(scheduler)
    for number, happens in enumerate(("nothing", "reset", "weights", "nothing")):
        ended = request(f"{number}", tokens_of(number, 4), 1)
        finish(scheduler, ended)
        if happens == "reset":
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            assert scheduler.replica_set.chains.latest() == []
            scheduler.memory.step()
        elif happens == "weights":
            monkeypatch.setattr(EXECUTOR, "weights_version", 5, raising=False)
        waits = request(f"{number} again", [*ended.all_token_ids, *tokens_of(9, 1)], 1)
        scheduler.add_request(waits)
        report = switch(scheduler, (4, 2)[number % 2])
        assert (report.cached_tokens > 0) == (happens == "nothing"), happens
        finish(scheduler, request(f"{number} more", tokens_of(70, 1), 1))
    assert not live.is_finished()


def test_caches_that_were_reset_before_new_weights_are_carried(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenRLHF does it: what is cached afterwards is of the new weights."""
    finish(scheduler, request("old", tokens_of(0, 4), 1))
    assert scheduler.reset_prefix_cache()
    monkeypatch.setattr(EXECUTOR, "weights_version", 5, raising=False)
    finish(scheduler, new := request("new", tokens_of(1, 4), 1))
    scheduler.add_request(request("again", [*new.all_token_ids, *tokens_of(9, 1)], 1))
    assert switch(scheduler, 2).cached_tokens > 0


def test_recomputing_leaves_everything_behind(scheduler: Any) -> None:
    anchor(scheduler)
    ended = request("a", tokens_of(1, 4), 1)
    finish(scheduler, ended)
    scheduler.controller.costs.mode = "recompute"
    assert switch(scheduler, 2).cached_tokens == 0
    assert max(cached(scheduler, ended)) == 0


def test_without_prefix_caching_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = new_scheduler(monkeypatch, enable_prefix_caching=False)
    anchor(scheduler)
    ended = Request("a", tokens_of(1, 4), SamplingParams(max_tokens=1), None)
    finish(scheduler, ended)
    assert switch(scheduler, 2).cached_tokens == 0
    assert scheduler.replica_set.chains.latest() == []


# -------------------------------------------------------------------- storms


@pytest.mark.parametrize(
    "scheduler", [*GROUPS, *(f"{name}, few blocks" for name in GROUPS)], indirect=True
)
@pytest.mark.parametrize("seed", range(3))
def test_storms(scheduler: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Conversations with random switches, aborts and resets: 0 wrong, 0 lost, blocks add up.

    With few blocks, requests are preempted, and computed again at switches.
    """
    rng = random.Random(seed)
    system = tokens_of(1000 + seed, 2)
    talks = {i: [*system, *tokens_of(i, rng.uniform(0.5, 4))] for i in range(16)}
    turns, live = dict.fromkeys(talks, 0), dict[int, Request]()
    reused = carried = 0
    for _ in range(250):
        for i, tokens in talks.items():
            if i not in live and turns[i] < 6 and rng.random() < 0.2:
                turn = request(f"{i}:{turns[i]}", list(tokens), rng.randint(1, 30))
                live[i] = turn
                scheduler.add_request(turn)
        event = rng.random()
        if event < 0.15:
            before = scheduler.controller.switch_id
            assert scheduler.controller.request_switch(rng.choice(TPS))
            if scheduler.controller.switch_id > before:
                carried += scheduler.controller.report().switches[-1].cached_tokens
        elif event < 0.18 and live:
            turn = rng.choice([*live.values()])
            scheduler.finish_requests(turn.request_id, RequestStatus.FINISHED_ABORTED)
        elif event < 0.19:
            scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        scheduler.memory.step()
        scheduler.replica_set.discard_retired()
        scheduler.memory.check()
        for i, turn in [*live.items()]:
            if turn.is_finished():
                del live[i]
                reused += scheduler.memory.hits.get(turn.request_id, 0)
                talks[i] = [*turn.all_token_ids, *tokens_of(rng.randrange(10**6), 0.7)]
                turns[i] += 1
    while any(scheduler.has_request(turn.request_id) for turn in live.values()):
        scheduler.memory.step()
    few = scheduler.kv_cache_config.num_blocks < 80
    assert carried > 20 * BLOCK_SIZE and reused > (20 if few else 50) * BLOCK_SIZE

"""Admission at a switch gives what vLLM's own gives; KV moves from blocks to blocks as admitted."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.kv_transfer.plan import BlockMove, RequestBlocks, plan_moves
from pat_vllm.scheduler.switching import switch_plan
from tests.support.kinds import full
from tests.vllm.scheduler.test_scheduler import step
from tests.vllm.without_workers import BLOCK_SIZE, EXECUTOR, pat_scheduler, request

LAYOUTS = (1, 8, 2, 4, 1)


def places(scheduler: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Replica and computed blocks of each request."""
    return {
        name: (
            replica.index,
            tuple(replica.scheduler.kv_cache_manager.get_block_ids(name)[0])[
                : -(-request.num_computed_tokens // BLOCK_SIZE)
            ],
        )
        for replica in scheduler.replica_set.replicas
        for name, request in replica.scheduler.requests.items()
    }


def cells(moves: Iterable[BlockMove]) -> set[tuple[Any, ...]]:
    return {
        (move.route, source, target)
        for move in moves
        for source, target in zip(move.source_blocks, move.target_blocks, strict=True)
    }


def check_moves(scheduler: Any, command: SwitchCommand, before: Any) -> None:
    """The KV of what waits with blocks now comes from where it was; no other KV is waited for.

    What else comes is cached in blocks that no request has.
    """
    requests = []
    free = set()
    for replica in scheduler.replica_set.replicas:
        pool = replica.scheduler.kv_cache_manager.block_pool
        free |= {(replica.index, block.block_id) for block in pool.blocks if block.ref_cnt == 0}
        for request_ in replica.scheduler.requests.values():
            assert replica.connector.get_num_new_matched_tokens(request_, 0) == (0, False)
        for request_ in replica.scheduler.kv_holding_waiting:
            name = request_.request_id
            source, blocks = before[name]
            (own,) = replica.scheduler.kv_cache_manager.get_block_ids(name)
            to = tuple(own[: len(blocks)])
            requests.append(RequestBlocks(name, source, blocks, replica.index, to))
    assert requests
    expected = plan_moves(command.source, command.target, full(8), requests)
    assert cells(command.moves) >= cells(expected)
    for route, _, target in cells(command.moves) - cells(expected):
        assert (command.target.replica_of(route.target_rank), target) in free


def carried(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> tuple[list[SwitchCommand], list[list[set[str]]]]:
    """Switches of a random load with pools that are too small.

    Returns:
        The commands to the workers, and by switch and replica the loads that vLLM counts as in
        flight.
    """
    scheduler = pat_scheduler(8, num_blocks=80)
    scheduler.controller.costs.mode = "migrate"
    commands: list[SwitchCommand] = []
    admitted = []
    make_switch = EXECUTOR.switch

    def switch(command: SwitchCommand) -> list[Any]:
        commands.append(command)
        return make_switch(command)

    rng = random.Random(seed)
    for index in range(40):
        scheduler.add_request(request(f"r{index}", index, 2 * rng.randint(8, 300)))
    with monkeypatch.context() as patch:
        patch.setattr(EXECUTOR, "switch", switch)
        for tp in LAYOUTS:
            for _ in range(3):
                step(scheduler)
            before = places(scheduler)
            scheduler.controller.request_switch(tp)
            check_moves(scheduler, commands[-1], before)
            admitted.append(
                [
                    {prefill.request_id for prefill in replica.scheduler._inflight_prefills}
                    for replica in scheduler.replica_set.replicas
                ]
            )
            scheduler.replica_set.discard_retired()
    switches = scheduler.controller.report().switches
    assert any(0 < report.migrated < report.migrated + report.recomputed for report in switches), (
        "no pool full"
    )
    return commands, admitted


@pytest.mark.parametrize("seed", range(2))
def test_what_vllm_admits(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    ours = carried(monkeypatch, seed)
    monkeypatch.setattr(switch_plan, "linear_time_admission", lambda scheduler: nullcontext())
    assert len(ours[0]) == len(LAYOUTS)
    assert ours == carried(monkeypatch, seed)

"""A wider layout runs as many requests in fewer replicas, unless limits are of a replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.structured_output import StructuredOutputManager

from pat_vllm.patches.schedulers import make_room_for_grammars
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.start.setup import Setup
from tests.vllm.scheduler.test_scheduler import add, step
from tests.vllm.without_workers import EXECUTOR, engine_config

RANKS = 8
SEQS = 4
"""`max_num_seqs` of these engines."""


def scheduler_in(tp: int, **options: Any) -> Any:
    """A scheduler of eight ranks, without workers, in the layout of this tp."""
    config, stock = engine_config(tp, num_blocks=200)
    config.scheduler_config.max_num_seqs = SEQS
    config.additional_config["pat"].update(kv_transfer="migrate", **options)
    EXECUTOR.setup = Setup.of(config)
    return PATScheduler(vllm_config=config, **stock)


def counts(scheduler: Any) -> tuple[int, int]:
    """Requests that run and that wait, after a step."""
    step(scheduler)
    running, waiting = scheduler.get_request_counts()
    return running, waiting


def test_every_layout_runs_as_many_requests_as_the_ranks_do() -> None:
    scheduler = scheduler_in(1)
    add(scheduler, RANKS * SEQS + 3)
    assert counts(scheduler) == (RANKS * SEQS, 3)
    for tp in (2, 8, 1, 4):
        assert scheduler.controller.request_switch(tp) is True
        assert counts(scheduler) == (RANKS * SEQS, 3)


def test_what_finds_no_place_after_a_switch_waits_with_its_kv() -> None:
    scheduler = scheduler_in(1, limits_per="replica")
    add(scheduler, RANKS * SEQS)
    assert counts(scheduler) == (RANKS * SEQS, 0)
    assert scheduler.controller.request_switch(8) is True
    assert counts(scheduler) == (SEQS, (RANKS - 1) * SEQS)
    assert scheduler.controller.report().switches[-1].migrated == RANKS * SEQS
    assert scheduler.controller.request_switch(1) is True
    assert counts(scheduler) == (RANKS * SEQS, 0)


def test_what_has_begun_is_served_before_what_has_not() -> None:
    """Wherever it was, and also where it is computed again."""
    scheduler = scheduler_in(1, limits_per="replica")
    scheduler.controller.costs.mode = "recompute"
    add(scheduler, RANKS * SEQS + 2 * RANKS)
    assert counts(scheduler) == (RANKS * SEQS, 2 * RANKS)
    assert scheduler.controller.request_switch(8) is True
    (replica,) = scheduler.replica_set.replicas
    queue = [request.num_preemptions for request in replica.scheduler.waiting]
    assert queue == [1] * RANKS * SEQS + [0] * 2 * RANKS
    rest = [request.arrival_time for request in replica.scheduler.waiting][RANKS * SEQS :]
    assert rest == sorted(rest)


def test_no_switch_counts_as_kv_that_is_fetched() -> None:
    scheduler = scheduler_in(1, limits_per="replica")
    add(scheduler, RANKS * SEQS)
    step(scheduler)
    assert scheduler.controller.request_switch(8) is True
    for _ in range(2):
        assert not scheduler.make_stats().num_kv_fetch_reqs_by_stage
        step(scheduler)


def test_a_layout_runs_no_more_than_the_policy_enters_it_with() -> None:
    policy = {"kind": "schedule", "switch_at": {"20": 4, "2": 8}}
    scheduler = scheduler_in(1, policy=policy)
    for tp, most in ((4, 16), (8, SEQS), (2, 2 * SEQS), (1, SEQS)):
        scheduler.controller.request_switch(tp)
        assert scheduler.replica_set.layout.tp == tp
        for replica in scheduler.replica_set.replicas:
            assert replica.scheduler.max_num_running_reqs == most


class Backend:
    """Of grammars, which allow everything."""

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.zeros(max_num_seqs, 1, dtype=torch.int32)

    def destroy(self) -> None: ...


@pytest.mark.parametrize("seqs, most, requests", [(4, 32, 32), (100, 800, 300)])
def test_every_request_of_a_layout_may_have_a_grammar(seqs: int, most: int, requests: int) -> None:
    """With more than 128, vLLM fills bitmasks in threads that it has for large engines."""
    config, _ = engine_config(8)
    config.scheduler_config.max_num_seqs = seqs
    manager: Any = StructuredOutputManager(config)
    make_room_for_grammars(manager, most)
    manager.backend = Backend()
    grammar = SimpleNamespace(
        is_terminated=lambda: False, fill_bitmask=lambda mask, index: mask[index].fill_(index)
    )
    request = SimpleNamespace(
        structured_output_request=SimpleNamespace(grammar=grammar, reasoning_ended=True),
        use_structured_output=True,
    )
    ids = [f"r{i}" for i in range(requests)]
    mask = manager.grammar_bitmask(dict.fromkeys(ids, request), ids, {})
    manager.clear_backend()
    assert mask[:, 0].tolist() == list(range(requests))

"""Groups and communicators of layouts on GPUs: made by all ranks in one order, on their devices.

In real processes over gloo. vLLM's and PAT's own code makes the groups and the communicators; a
rank notes each call before it makes it (`communicators.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pat_vllm.layout import Layout, device_of
from tests.gpuless.collectives import Outcome
from tests.gpuless.programs import Program, asked_for, running
from tests.gpuless.sequences import Merge

SIZES = ("4", "8")
PER_GROUP = (
    "FlashInfer workspace",
    "NCCL communicator",
    "custom all-reduce's buffers",
    "symmetric memory",
)
"""What each group of two ranks or more has of its own."""


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Program]:
    """Starts and switches with each number of ranks."""
    sizes = asked_for(request, "size")
    with running("collectives", tmp_path_factory.mktemp("collectives"), *sizes) as program:
        yield program


def check_order(outcome: Outcome) -> None:
    """There is one order of all ranks' calls: none waits for ever."""
    merge = Merge.of(outcome.events)
    assert not merge.waiting, merge.waiting
    assert sorted(outcome.ended) == list(range(len(outcome.events)))


def check_devices(outcome: Outcome) -> None:
    """Each rank has its device, and asks for what its group's devices can do."""
    size = len(outcome.events)
    for rank, events in enumerate(outcome.events):
        own = device_of(rank, size)
        for event in events:
            devices = [device_of(member, size) for member in event.ranks]
            if event.kind == "links":
                assert list(event.devices) == devices, event
            elif event.kind == "peer access":
                asking, asked = event.devices
                assert asking == own and asked in devices and asked != own, event
            elif event.devices:
                assert event.devices == (own,), event


def check_constructors(outcome: Outcome) -> None:
    """Each layout's group has its communicators, which are made at start."""
    size = len(outcome.events)
    for rank, events in enumerate(outcome.events):
        made = [event for event in events if event.constructs]
        assert {event.phase for event in made} == {"start"}, made[-1]
        expected = [Layout.of(tp, size) for tp in (2, 4, 8) if tp <= size]
        groups = {tuple(one.ranks_of(one.replica_of(rank))) for one in expected}
        for kind in PER_GROUP:
            assert {event.ranks for event in made if event.kind == kind} == groups, kind


def check_kinds(outcome: Outcome) -> None:
    """Every way of an all-reduce, every question about devices, every layout's steps are there."""
    size = len(outcome.events)
    for events in outcome.events:
        kinds = {event.kind for event in events}
        ways = {f"{way} all-reduce" for way in ("FlashInfer", "NCCL", "custom")}
        assert kinds >= {*PER_GROUP, *ways, "peer access", "links", "exchange", "new_group"}
        switches = {event.phase for event in events if event.phase.startswith("switch")}
        layouts = sum(size % tp == 0 for tp in range(1, size + 1))
        assert len(switches) == layouts * (layouts - 1)
        moved = [event for event in events if event.kind == "all_to_all_single"]
        assert {event.phase for event in moved} >= switches


@pytest.mark.costly
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", [check_order, check_devices, check_constructors, check_kinds])
def test_all_ranks_make_the_same_calls_on_their_devices(
    ranks: Program, size: str, check: Callable[[Outcome], None]
) -> None:
    outcome = Outcome.read(ranks.of(size))
    assert not outcome.errors, outcome.errors[0]
    check(outcome)

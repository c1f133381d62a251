"""Groups and communicators of layouts on GPUs: made by all ranks in one order, on their devices.

In real processes over gloo. vLLM's and PAT's own code makes the groups and the communicators; a
rank notes each call before it makes it (`communicators.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pat_vllm.layout import Layout, device_of
from tests.gpuless.programs import Program, program
from tests.gpuless.sequences import Event, Merge

SIZES = ("4", "8")
PER_GROUP = (
    "FlashInfer workspace",
    "NCCL communicator",
    "custom all-reduce's buffers",
    "symmetric memory",
)
"""What each group of two ranks or more has of its own."""

SUSPENDED = ("FlashInfer", "NCCL")
"""Whose memory a sleep gives back, with `enable_nccl_comm_suspend`."""

Events = Sequence[Sequence[Event]]
"""Of each rank, in its order."""


ranks = program("collectives", "size")
"""Starts and switches with each number of ranks."""


def check_order(events: Events) -> None:
    """There is one order of all ranks' calls: none waits for ever."""
    merge = Merge(events)
    assert not merge.waiting, merge.waiting
    assert [rank[-1].kind for rank in events] == ["end"] * len(events)


def check_devices(events: Events) -> None:
    """Each rank has its device, and asks for what its group's devices can do."""
    size = len(events)
    for rank, of_rank in enumerate(events):
        own = device_of(rank, size)
        for event in of_rank:
            devices = [device_of(member, size) for member in event.ranks]
            if event.kind == "links":
                assert list(event.devices) == devices, event
            elif event.kind == "peer access":
                asking, asked = event.devices
                assert asking == own and asked in devices and asked != own, event
            elif event.devices:
                assert event.devices == (own,), event


def check_constructors(events: Events) -> None:
    """Each layout's group has its communicators, which are made at start."""
    size = len(events)
    for rank, of_rank in enumerate(events):
        constructed = [event for event in of_rank if event.constructs]
        assert {event.phase for event in constructed} == {"start"}, constructed[-1]
        for kind in PER_GROUP:
            ranks = {event.ranks for event in constructed if event.kind == kind}
            assert ranks == groups_of(rank, size), kind


def groups_of(rank: int, size: int) -> set[tuple[int, ...]]:
    """The ranks of each layout's group that a rank is in, but for itself alone."""
    layouts = [Layout.of(tp, size) for tp in (2, 4, 8) if tp <= size]
    return {tuple(layout.ranks_of(layout.replica_of(rank))) for layout in layouts}


def check_sleep(events: Events) -> None:
    """The communicators of every layout give their memory back in a sleep, and take it up again."""
    for rank, of_rank in enumerate(events):
        for library in SUSPENDED:
            for phase, kind in (("sleep", "suspends"), ("wake up", "resumes")):
                calls = [event for event in of_rank if event.kind == f"{library} {kind}"]
                assert {event.phase for event in calls} == {phase}
                each_once = sorted(groups_of(rank, len(events)))
                assert sorted(event.ranks for event in calls) == each_once, (library, kind)


def check_kinds(events: Events) -> None:
    """Every way of an all-reduce is there, and every question about devices."""
    ways = {f"{way} all-reduce" for way in ("FlashInfer", "NCCL", "custom")}
    for of_rank in events:
        assert {event.kind for event in of_rank} >= {*PER_GROUP, *ways, "peer access", "links"}
        switches = {event.phase for event in of_rank if event.phase.startswith("switch")}
        moved = {event.phase for event in of_rank if event.kind == "all_to_all_single"}
        assert moved >= switches != set()


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_make_the_same_calls_on_their_devices(ranks: Program, size: str) -> None:
    events = [[Event.read(fields) for fields in rank] for rank in ranks.of(size)]
    errors = [event.detail for rank in events for event in rank if event.kind == "error"]
    assert not errors, errors[0]
    for check in (check_order, check_devices, check_constructors, check_kinds, check_sleep):
        check(events)

"""Groups and communicators of layouts on GPUs: made by all ranks in one order, on their devices.

In real processes over gloo. vLLM's and PAT's own code makes the groups and the communicators; a
rank notes each call before it makes it (`communicators.py`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pat_vllm.layout import Layout, device_of
from tests.gpuless.collectives import MISTAKES, Outcome, read
from tests.gpuless.sequences import Event, Merge
from tests.support.child import Child

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
V2_ON_CPU = ROOT / "tests" / "support" / "v2_on_cpu"
SIZES = (4, 8)
PER_GROUP = (
    "FlashInfer workspace",
    "NCCL communicator",
    "custom all-reduce's buffers",
    "symmetric memory",
)
"""What each group of two ranks or more has of its own."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Of a case without a mistake, by its number of ranks, and of each mistake."""
    path = os.pathsep.join([str(V2_ON_CPU), str(ROOT), os.environ.get("PYTHONPATH", "")])
    child = Child(
        [sys.executable, "-m", "tests.gpuless.collectives", *map(str, SIZES)],
        tmp_path_factory.mktemp("collectives") / "log",
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"},
    )
    try:
        assert child.wait() == 0, child.tail()
    finally:
        child.kill()
    return dict(read(line) for line in child.output.splitlines() if line.startswith('["'))


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


CHECKS = (check_order, check_devices, check_constructors)

SEEN_BY: dict[str, Callable[[Outcome], None]] = {
    "peers are asked for by their place in the group": check_devices,
    "a rank makes its groups in another order": check_order,
    "groups are made by their members only": check_order,
    "a rank's device is its place in the group": check_devices,
    "a rank measures its layouts in another order": check_order,
    "a layout keeps the workspace of another": check_order,
    "a rank does not take part in an exchange": check_order,
    "a switch makes its exchange": check_constructors,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", CHECKS)
def test_all_ranks_make_the_same_calls_on_their_devices(
    outcomes: dict[str, Outcome], size: int, check: Callable[[Outcome], None]
) -> None:
    outcome = outcomes[str(size)]
    assert not outcome.errors, outcome.errors[0]
    check(outcome)


@pytest.mark.parametrize("size", SIZES)
def test_what_is_done_is_seen(outcomes: dict[str, Outcome], size: int) -> None:
    """Every way of an all-reduce, every question about devices, every layout's steps."""
    for events in outcomes[str(size)].events:
        kinds = {event.kind for event in events}
        ways = {f"{way} all-reduce" for way in ("FlashInfer", "NCCL", "custom")}
        assert kinds >= {*PER_GROUP, *ways, "peer access", "links", "exchange", "new_group"}
        switches = {event.phase for event in events if event.phase.startswith("switch")}
        layouts = sum(size % tp == 0 for tp in range(1, size + 1))
        assert len(switches) == layouts * (layouts - 1)
        moved = [event for event in events if event.kind == "all_to_all_single"]
        assert {event.phase for event in moved} >= switches


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(outcomes: dict[str, Outcome], mistake: str) -> None:
    outcome = outcomes[mistake]
    assert not outcome.errors, outcome.errors[0]
    with pytest.raises(AssertionError):
        SEEN_BY[mistake](outcome)


def test_one_order_or_none() -> None:
    """Two groups that cross are carried out, whatever comes first, but not in a circle."""
    a, b = (0, 1), (1, 2)

    def call(rank: int, ranks: tuple[int, ...], kind: str = "reduce") -> Event:
        return Event(rank, "", kind, str(ranks), ranks)

    fine = [[call(0, a)], [call(1, b), call(1, a)], [call(2, b)]]
    merge = Merge.of(fine)
    assert [one.ranks for one in merge.done] == [b, a] and not merge.waiting
    wrong = [[call(0, a)], [call(1, a, "gather")], []]
    merge = Merge.of(wrong)
    assert set(merge.waiting) == {0, 1} and not merge.stuck(ended=()) and merge.stuck(ended={2})
    c = (0, 2)
    circle = [[call(0, a), call(0, c)], [call(1, b), call(1, a)], [call(2, c), call(2, b)]]
    merge = Merge.of(circle)
    assert not merge.done and merge.stuck(ended=())

"""The imitations of streams, memory, CUDA graphs and collectives see what they are made to see."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.gpuless.cuda_graphs import Driver, GraphError
from tests.gpuless.devices import CUDA, Devices, imitated
from tests.gpuless.sequences import Event, Merge


@pytest.fixture
def devices() -> Iterator[Devices]:
    with imitated(1) as made, made.on(0):
        yield made


def races(devices: Devices) -> list[str]:
    """Those so far; they are forgotten."""
    gc.collect()
    found, devices.races.found = devices.races.found, []
    return found


@pytest.mark.parametrize("wait", ["stream", "event", "host", "too early"])
def test_another_stream_has_to_wait(devices: Devices, wait: str) -> None:
    """For the columns that it reads."""
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    rows = torch.zeros(4, 4, device=CUDA)
    event.record()
    rows[:, :2].fill_(1)
    if wait == "stream":
        side.wait_stream(torch.cuda.current_stream())
    elif wait == "host":
        torch.accelerator.synchronize()
    elif wait == "event":
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        rows[:, 2:].clone()
        assert not races(devices)
        rows.clone()
    found = races(devices)
    assert len(found) == (wait == "too early")
    assert all("test_another_stream" in part for one in found for part in one.split(" and "))


@pytest.mark.parametrize("waited", [True, False])
def test_memory_is_given_on_when_all_streams_are_done(devices: Devices, waited: bool) -> None:
    side, used = torch.cuda.Stream(), torch.zeros(64, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        used.add_(1)
    if waited:
        torch.cuda.current_stream().wait_stream(side)
    del used
    torch.zeros(64, device=CUDA)
    assert bool(races(devices)) == (not waited)


@pytest.mark.parametrize("blocking", [False, True])
def test_the_host_has_to_wait_for_a_copy(devices: Devices, blocking: bool) -> None:
    copy = torch.ones(4, device=CUDA).to("cpu", non_blocking=not blocking)
    assert copy.numpy().tolist() == [1.0] * 4
    assert bool(races(devices)) == (not blocking)


def test_a_replay_computes_on_the_same_memory() -> None:
    driver = Driver()
    graph = driver.make_graph()
    weight, given, result = torch.ones(2, 2), torch.tensor([1.0, 2.0]), torch.zeros(2)
    with driver.capture(graph, driver.graph_pool_handle()):
        between = given @ weight
        result.copy_(between.add_(1) * 2)
    weight *= 10
    given += 1
    for _ in range(2):
        result.zero_()
        graph.replay()
        assert result.tolist() == [102.0, 102.0]
    other = driver.make_graph()
    with driver.capture(other, driver.graph_pool_handle()):
        result.copy_(given)
    del weight
    with pytest.raises(GraphError, match="freed"):
        graph.replay()
    given.untyped_storage().resize_(0)
    with pytest.raises(GraphError, match="elsewhere"):
        other.replay()


def test_what_a_driver_refuses() -> None:
    driver = Driver()
    pool = driver.graph_pool_handle()
    graph = driver.make_graph()
    with pytest.raises(GraphError, match="waits"), driver.capture(graph, pool):
        torch.ones(1).item()
    with pytest.raises(GraphError, match="twice"):
        graph.capture_begin(pool)
    del graph
    gc.collect()
    with pytest.raises(GraphError, match="released"):
        driver.make_graph().capture_begin(pool)


def test_one_order_or_none() -> None:
    """Two groups that cross are carried out, whatever comes first, but not in a circle."""
    a, b, c = (0, 1), (1, 2), (0, 2)

    def call(rank: int, ranks: tuple[int, ...], kind: str = "reduce") -> Event:
        return Event(rank, "", kind, str(ranks), ranks)

    merge = Merge([[call(0, a)], [call(1, b), call(1, a)], [call(2, b)]])
    assert [one.ranks for one in merge.done] == [b, a] and not merge.waiting
    merge = Merge([[call(0, a)], [call(1, a, "gather")], []])
    assert set(merge.waiting) == {0, 1} and not merge.stuck(ended=()) and merge.stuck(ended={2})
    circle = [[call(0, a), call(0, c)], [call(1, b), call(1, a)], [call(2, c), call(2, b)]]
    merge = Merge(circle)
    assert not merge.done and merge.stuck(ended=())

"""The imitation of CUDA graphs refuses what a driver refuses, and what would be garbage."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.gpuless.cuda_graphs import Driver, GraphError


def test_a_replay_computes_on_the_same_memory() -> None:
    driver = Driver()
    driver.stream = object()  # as inside vLLM's `graph_capture`
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
    driver.stream = object()
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

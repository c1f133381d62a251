"""CUDA graphs of every layout, captured by vLLM's own graph manager, replayed by an imitation.

vLLM decides at import whether there is Triton, so a process of its own runs the checks
(`tests/gpuless/graph_checks.py`) and writes down what they see. Each test waits for one of them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpuless.cuda_graphs import Driver, GraphError
from tests.gpuless.graph_checks import CHECKS
from tests.gpuless.graph_mistakes import MISTAKES, NIGHTLY
from tests.support.child import Child

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
V2_ON_CPU = ROOT / "tests" / "support" / "v2_on_cpu"


class Verdicts:
    """What the child has written down, and will."""

    def __init__(self, child: Child, out: Path) -> None:
        self._child = child
        self._out = out

    def _said(self) -> dict[tuple[str, str], str | None]:
        lines = self._out.read_text().split("\n")[:-1] if self._out.exists() else []
        return {(kind, name): seen for kind, name, seen in map(json.loads, lines)}

    def of(self, kind: str, name: str) -> str | None:
        """What was wrong, if anything."""
        self._child.wait_for(lambda: (kind, name) in self._said(), f"{kind}: {name}")
        return self._said()[kind, name]


def marked(names: Iterable[str]) -> list[Any]:
    """Names for `pytest.mark.parametrize`."""
    nightly = pytest.mark.nightly
    return [pytest.param(name, marks=nightly if name in NIGHTLY else ()) for name in names]


@pytest.fixture(scope="module")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Verdicts]:
    folder = tmp_path_factory.mktemp("graphs")
    path = os.pathsep.join([str(V2_ON_CPU), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {
        "PYTHONPATH": path,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        # Graphs for mixed batches without `torch.compile`.
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",
    }
    out = folder / "verdicts.jsonl"
    mine = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in mine if hasattr(item, "callspec")]
    wanted = [name for case in cases for name in case.values()]
    command = [sys.executable, "-m", "tests.gpuless.graph_checks", str(out), *wanted]
    child = Child(command, folder / "log", cwd=ROOT, env=environment)
    try:
        yield Verdicts(child, out)
    finally:
        child.kill()


@pytest.mark.parametrize("check", marked(CHECKS))
def test_graphs(verdicts: Verdicts, check: str) -> None:
    assert verdicts.of("check", check) is None


@pytest.mark.parametrize("mistake", marked(MISTAKES))
def test_a_mistake_is_seen(verdicts: Verdicts, mistake: str) -> None:
    assert verdicts.of("mistake", mistake) is not None


# ---------------------------------------------------------------- the imitation


def test_a_replay_computes_on_the_same_memory() -> None:
    driver = Driver()
    graph = driver.make_graph()
    weight, given, result = torch.ones(2, 2), torch.tensor([1.0, 2.0]), torch.zeros(2)
    with driver.capture(graph, driver.graph_pool_handle()):
        between = given @ weight
        result.copy_(between.add_(1) * 2)
    weight *= 10
    given += 1
    graph.replay()
    assert result.tolist() == [102.0, 102.0]
    with torch.inference_mode():
        result.zero_()
    graph.replay()
    assert result.tolist() == [102.0, 102.0]
    assert {weight.data_ptr(), given.data_ptr(), result.data_ptr()} <= graph.addresses
    assert between.data_ptr() not in graph.addresses


def test_memory_that_is_gone_or_elsewhere() -> None:
    driver = Driver()
    result = torch.zeros(4)
    weight = torch.ones(4)
    graph = driver.make_graph()
    with driver.capture(graph, driver.graph_pool_handle()):
        result.copy_(weight[:2].repeat(2))
    del weight
    with pytest.raises(GraphError, match="freed"):
        graph.replay()

    weight = torch.ones(4)
    graph = driver.make_graph()
    with driver.capture(graph, driver.graph_pool_handle()):
        result.copy_(weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(GraphError, match="elsewhere"):
        graph.replay()


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
    with driver.capture(driver.make_graph(), driver.graph_pool_handle()), pytest.raises(GraphError):
        driver.make_graph().capture_begin()
    with pytest.raises(GraphError, match="not captured"):
        driver.make_graph().replay()

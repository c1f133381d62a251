"""CUDA graphs of every layout, captured by vLLM's own graph manager, replayed by an imitation.

vLLM decides at import whether there is Triton, so a process of its own runs the checks
(`graph_checks.py`). Each test waits for one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpuless.graph_checks import EVERY_CHANGE
from tests.gpuless.programs import Program, asked_for, running


@pytest.fixture(scope="module")
def graphs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Program]:
    """The checks that the module's tests ask for."""
    wanted = asked_for(request, "check")
    folder = tmp_path_factory.mktemp("graphs")
    # Graphs for mixed batches without `torch.compile`.
    with running("graph_checks", folder, *wanted, VLLM_USE_BREAKABLE_CUDAGRAPH="1") as program:
        yield program


@pytest.mark.costly
@pytest.mark.parametrize("check", EVERY_CHANGE)
def test_graphs(graphs: Program, check: str) -> None:
    assert graphs.of(check) is None

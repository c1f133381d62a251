"""CUDA graphs of every layout, captured by vLLM's own graph manager, replayed by an imitation.

vLLM decides at import whether there is Triton, so a process of its own runs the checks
(`graph_checks.py`). Each test waits for one of them.
"""

from __future__ import annotations

import pytest

from tests.gpuless.graph_checks import EVERY_CHANGE
from tests.gpuless.programs import Program, program

# Graphs for mixed batches without `torch.compile`.
graphs = program("graph_checks", "check", VLLM_USE_BREAKABLE_CUDAGRAPH="1")


@pytest.mark.costly
@pytest.mark.parametrize("check", EVERY_CHANGE)
def test_graphs(graphs: Program, check: str) -> None:
    assert graphs.of(check) is None

"""CUDA graphs of mixtures whose experts are spread, and their order with Model Runner V1."""

from __future__ import annotations

import pytest

from tests.gpuless.graph_checks import CHECKS, EVERY_CHANGE
from tests.gpuless.programs import Program
from tests.gpuless.test_cuda_graphs import graphs

__all__ = ["graphs"]


@pytest.mark.parametrize("check", [name for name in CHECKS if name not in EVERY_CHANGE])
def test_graphs(graphs: Program, check: str) -> None:
    assert graphs.of(check) is None

"""Engines start with a user's defaults: vLLM's own start path, on GPUs without contents."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpuless.platforms import PLATFORMS
from tests.gpuless.programs import Program, program
from tests.gpuless.start import GPUS, MEMORY, MODELS

CASES = [f"{platform}:{model}" for platform in PLATFORMS for model in MODELS]


starts = program("start", "case")


@pytest.mark.parametrize("case", CASES)
def test_a_start_with_defaults(starts: Program, case: str) -> None:
    """It has come to its end, with every layout, and within the memory that it may have."""
    started: dict[str, Any] = starts.of(case)
    assert "failed" not in started, started["failed"]
    assert f"tp1dp{GPUS}" in started["layouts"] and f"tp{GPUS}dp1" in started["layouts"]
    assert started["graphs"] == "FULL_AND_PIECEWISE"
    assert started["used"] < 0.92 * MEMORY and started["blocks"] > 0
    # A step, and the exchange, are gone through; so are rows of weights that stay in place.
    assert {"copy_runs_kernel", "_post_update_kernel"} <= started["launched"].keys()
    assert ("swap_kernel" in started["launched"]) == started["in_place"]

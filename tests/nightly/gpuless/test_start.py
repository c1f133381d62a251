"""Starts with a user's defaults: every model on every platform."""

from __future__ import annotations

import pytest

from tests.gpuless.platforms import PLATFORMS
from tests.gpuless.programs import Program
from tests.gpuless.start import MODELS
from tests.gpuless.test_start import CASES, check_start, starts

__all__ = ["starts"]

EVERY = (f"{platform}:{model}" for platform in PLATFORMS for model in MODELS)


@pytest.mark.parametrize("case", [case for case in EVERY if case not in CASES])
def test_a_start_with_defaults(starts: Program, case: str) -> None:
    check_start(starts.of(case))

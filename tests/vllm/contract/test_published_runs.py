"""What needs no kernels runs on the Python files of a vLLM that has no CPU build."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.contract.published_runs import PUBLISHED, run_on

RUN = ("scheduler/test_scheduler.py", "executor/test_lanes.py")

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("version", PUBLISHED)
def test_schedulers_and_lanes(version: str, tmp_path: Path) -> None:
    run_on(version, [f"vllm/{path}" for path in RUN], tmp_path)

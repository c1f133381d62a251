"""The matrix of platforms on the Python files of a vLLM without a CPU build."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpuless.test_platforms_of_published import PUBLISHED, run_on


@pytest.mark.parametrize("version", PUBLISHED)
def test_platforms(version: str, tmp_path: Path) -> None:
    run_on(version, ["gpuless/test_platforms.py"], tmp_path, v2=True)

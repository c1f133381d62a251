"""On the Python files of a vLLM without a CPU build: platforms, and what needs no kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.contract.published_runs import PUBLISHED, run_on


@pytest.mark.parametrize("version", PUBLISHED)
def test_platforms(version: str, tmp_path: Path) -> None:
    tests = ["nightly/gpuless/test_platforms.py", "gpuless/test_kv_layouts.py"]
    run_on(version, tests, tmp_path, v2=True)


@pytest.mark.parametrize("version", PUBLISHED)
def test_engine_core(version: str, tmp_path: Path) -> None:
    run_on(version, ["vllm/scheduler", "vllm/executor"], tmp_path)


@pytest.mark.parametrize("version", PUBLISHED)
def test_workers(version: str, tmp_path: Path) -> None:
    folders = ("kv_transfer", "memory", "metrics", "worker")
    files = (
        *("capture_sizes", "collectives", "draft_graphs", "happens_before", "layouts_in_updates"),
        *("sizes", "worker"),
    )
    tests = [f"vllm/{folder}" for folder in folders] + [f"gpuless/test_{file}.py" for file in files]
    run_on(version, tests, tmp_path, v2=True)

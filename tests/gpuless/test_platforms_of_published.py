"""The same on the Python files of a vLLM without a CPU build, in processes that import those."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.contract.wheels import Unavailable, vllm_sources
from tests.gpuless.test_platforms import V2_ON_CPU
from tests.support.child import Child

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ("0.33.0",)


@pytest.mark.parametrize(
    "tests", ["test_kv_layouts.py", pytest.param("test_platforms.py", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("version", PUBLISHED)
def test_what_is_decided_on_gpus(version: str, tests: str, tmp_path: Path) -> None:
    try:
        sources = vllm_sources(version)
    except Unavailable as why:
        pytest.skip(f"vLLM {version} was NOT run: {why}")
    # vLLM asks for the version of what is installed, and for Triton's backends.
    installed = tmp_path / f"vllm-{version}+cpu.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: vllm\nVersion: {version}+cpu\n")
    folders = (sources, tmp_path, V2_ON_CPU, ROOT, os.environ.get("PYTHONPATH", ""))
    path = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TRITON_INTERPRET": "1"}
    child = Child(
        [
            *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"),
            *("-p", "tests.gpuless.python_files", f"tests/gpuless/{tests}"),
        ],
        tmp_path / "log",
        silence=600,
        cwd=ROOT,
        env=os.environ | path,
    )
    try:
        assert child.wait() == 0, child.tail(20_000)
    finally:
        child.kill()
    assert f"vLLM {version} of {sources}" in child.output
    assert " skipped" not in child.output

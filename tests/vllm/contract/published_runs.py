"""Tests on the Python files of a vLLM without a CPU build, in processes that import those."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gpuless.programs import ROOT, SUPPORT
from tests.support.child import Child
from tests.vllm.contract.wheels import Unavailable, vllm_sources

PUBLISHED = ("0.33.0",)


def run_on(version: str, tests: Sequence[str], folder: Path, v2: bool = False) -> None:
    """Run tests on a version of vLLM.

    Args:
        tests: files and folders of `tests`.
        v2: with Model Runner V2, which Triton's interpreter runs.
    """
    try:
        sources = vllm_sources(version)
    except Unavailable as why:
        pytest.skip(f"vLLM {version} was NOT run: {why}")
    # vLLM asks for the version of what is installed, and for Triton's backends.
    installed = folder / f"vllm-{version}+cpu.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Name: vllm\nVersion: {version}+cpu\n")
    plugin = folder / "python_files.py"
    plugin.write_text("import vllm\n\n\ndef pytest_report_header():\n    return vllm.__file__\n")
    runner = [SUPPORT / "v2_on_cpu"] if v2 else []
    folders = [sources, folder, *runner, ROOT, os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-m", "pytest", "-v", "--noconftest", "-p", "no:cacheprovider"]
    child = Child(
        [*command, "-p", "python_files", *(f"tests/{test}" for test in tests)],
        folder / "log",
        silence=600,
        cwd=ROOT,
        env=os.environ | path | ({"TRITON_INTERPRET": "1"} if v2 else {}),
    )
    try:
        assert child.wait() == 0, child.tail(20_000)
    finally:
        child.kill()
    assert str(sources / "vllm" / "__init__.py") in child.output
    assert " skipped" not in child.output and " passed" in child.output

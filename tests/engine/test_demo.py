"""`examples/demo.py`, as `make demo` runs it, with a small model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.child import Child
from tests.support.models import random_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("model", "options"), [("qwen3", ())])
def test_the_demo(model: str, options: tuple[str, ...], tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    batch = ("--requests", "8", "--max-tokens", "48", "--rounds", "2", "--output", str(picture))
    # As a user has it, rather than as conftest.py sets it: a core for each rank.
    ours = ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    command += ["--model", str(random_model(model)), *batch, *options]
    child = Child(command, tmp_path / "log", cwd=tmp_path, env=environment)
    try:
        assert child.wait() == 0, child.tail()
    finally:
        child.kill()
    assert "The tokens of all runs agree." in child.output
    for number in ("1 of 2, warming up", "2 of 2"):
        assert f"round {number}: replicas " in child.output
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000

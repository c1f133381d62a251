"""The exchange over NCCL, as far as one GPU goes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.child import Child

pytestmark = pytest.mark.gpu


def test_a_rank_alone_exchanges_with_itself(tmp_path: Path) -> None:
    """Zero counts, inference mode, two layers under way; then a CUDA graph, and again."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; this machine has none")
    program = ["-m", "tests.support.one_rank", "nccl", "cuda:0", f"file://{tmp_path}/rendezvous"]
    child = Child([sys.executable, *program], tmp_path / "log", cwd=Path(__file__).parents[2])
    try:
        assert child.wait() == 0, child.tail()
    finally:
        child.kill()

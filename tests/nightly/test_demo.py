"""`examples/demo.py` with drafts."""

from __future__ import annotations

from pathlib import Path

from tests.engine.test_demo import test_the_demo as check_demo


def test_the_demo_with_drafts(tmp_path: Path) -> None:
    check_demo("repeating", ("--speculate",), tmp_path)

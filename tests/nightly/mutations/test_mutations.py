"""Each mistake of the table makes a test of every change fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly.mutations.run import ROOT, areas


@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("area", areas())
def test_every_mistake_is_caught(area: str, tmp_path: Path) -> None:
    """In a process of its own, from which the runs are forked."""
    command = [sys.executable, "-m", "tests.nightly.mutations.run", "--area", area]
    verdicts = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert verdicts.returncode == 0, verdicts.stderr
    missed = [line for line in verdicts.stdout.splitlines() if line.startswith("MISSED")]
    assert not missed

"""`make test-gpu` has tests to run: a mark that no test has would make it stop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_makefile_selects_tests() -> None:
    (arguments,) = re.findall(r"-m pytest (-m gpu .*)", (ROOT / "Makefile").read_text())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    listed = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert listed.stdout.count("::test_") >= 5, listed.stdout

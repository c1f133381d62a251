"""What a measurement says of where it was made."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.record import machine


def test_a_command_names_no_folder_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path / "before"), "--starts", "3", "a/b"])
    assert str(machine()["command"]).endswith(" before --starts 3 a/b")

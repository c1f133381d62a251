"""`pat-vllm profile` with an engine that answers at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pat_vllm.cli import profile as command
from pat_vllm.profile import Profile

MEASURED = Path(__file__).parents[3] / "benchmarks/profiles/2026-11-23-two-cores.json"


class Engine:
    """Answers `pat_profile`."""

    def __init__(self, problems: tuple[str, ...] = ()) -> None:
        self.profile = Profile.load(MEASURED)
        self.asked: list[Any] = []
        self._problems = problems

    def collective_rpc(self, name: str, kwargs: Any) -> list[Any]:
        self.asked.append((name, kwargs))
        return [{"profile": self.profile.model_dump(mode="json"), "problems": self._problems}]


def take(monkeypatch: pytest.MonkeyPatch, engine: Engine, **options: Any) -> str:
    @contextmanager
    def running(*_: Any) -> Iterator[Engine]:
        yield engine

    monkeypatch.setattr(command, "_engine", running)
    console = Console(file=StringIO(), width=120)
    command.take_profile(console, {}, command.ProfileOptions(**options))
    printed: str = console.file.getvalue()  # type: ignore[attr-defined]
    return " ".join(printed.split())


def test_a_profile_is_written_and_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "new" / "p.json"
    printed = take(monkeypatch, engine := Engine(), output=path, budget=7.0)
    assert engine.asked == [("pat_profile", {"seconds": 7.0})]
    assert Profile.load(path) == engine.profile
    assert engine.profile.title in printed and "tp1dp2" in printed and "held-out" in printed
    assert "mislead" not in printed


def test_a_file_is_named_after_its_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    take(monkeypatch, Engine())
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("Qwen3-4x512-2x") and path.suffix == ".json"


def test_problems_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    printed = take(monkeypatch, Engine(("it is noisy: so and so",)), output=tmp_path / "p.json")
    assert "mislead PAT: it is noisy: so and so. Let nothing" in printed
    assert "longer --budget" in printed

"""`pat-vllm profile` with an engine that answers at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from pat_vllm.cli import profile as command
from pat_vllm.profile import Profile, ProfileError, StepSample, StepShape, SwitchSample
from pat_vllm.profiling.grid import POINTS, Plan, Point, StepPoint
from tests.unit.profiling.test_grid import LIMITS, switch_sample
from tests.unit.profiling.test_quality import NOISY, QUIET
from tests.unit.test_profile import KEY, profile

PLAN = Plan.of(LIMITS, quick=True)


class Engine:
    """Answers `pat_profile`; `stops_after` so many slices it is interrupted."""

    def __init__(self, stops_after: int = 1000, noisy: int = 0, **key: Any) -> None:
        self.header = profile({**KEY, **key}).model_dump(
            exclude={"created", "steps", "switches", "note", "format"}
        )
        self.header["key"]["model"] = {"architecture": "Some"}
        self.asked: list[Point] = []
        self._left, self._noisy = stops_after, noisy

    def collective_rpc(self, name: str, args: Any = (), kwargs: Any = None) -> list[Any]:
        if not args:
            points = POINTS.dump_python([*PLAN.points])
            return [{"header": self.header, "points": points, "essential": PLAN.essential}]
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        points = POINTS.validate_python(args[0])
        self.asked += points
        samples = [self._sample(point) for point in points]
        steps = [sample.model_dump() for sample in samples if isinstance(sample, StepSample)]
        switches = [sample.model_dump() for sample in samples if isinstance(sample, SwitchSample)]
        return [{"steps": steps, "switches": switches}]

    def _sample(self, point: Point) -> StepSample | SwitchSample:
        if not isinstance(point, StepPoint):
            return switch_sample(point)
        batch, drafts = point.batch, point.batch * point.drafts
        contexts = [context + 5 for context in point.contexts]
        longest = max(contexts, default=0)
        shape = StepShape(batch, sum(contexts), longest, point.prefill, point.busy, drafts, point.k)
        self._noisy -= 1
        times = NOISY if self._noisy >= 0 else QUIET
        return StepSample.of(point.layout, shape, [seconds * (8 + batch) for seconds in times])


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def take(engine: Engine, budget: float | None = None) -> str:
        @contextmanager
        def running(*_: Any) -> Iterator[Engine]:
            yield engine

        monkeypatch.setattr(command, "_engine", running)
        printed = StringIO()
        console = Console(file=printed, width=120)
        options = command.ProfileOptions(output=tmp_path / "p.json", quick=True, budget=budget)
        command.take_profile(console, {}, options)
        return printed.getvalue()

    return take


def test_an_interrupted_run_goes_on(take: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        take(first := Engine(stops_after=3))
    half = Profile.load(tmp_path / "p.json")
    assert "points left out" in half.note and first.asked == [*PLAN.points[: len(first.asked)]]
    assert len(first.asked) == max(4, PLAN.essential) + 2 * 4
    printed = take(second := Engine())
    assert [*first.asked, *second.asked] == [*PLAN.points]
    assert "going on with" in printed and "held-out" in printed and "mislead" not in printed
    whole = Profile.load(tmp_path / "p.json")
    assert whole.steps[: len(half.steps)] == half.steps and whole.note == "pat-vllm profile"
    take(third := Engine())
    assert not third.asked


def test_noise_is_named_and_measured_again(take: Any) -> None:
    noisy = len(PLAN.points) // 2
    printed = " ".join(take(engine := Engine(noisy=noisy)).split())
    assert f"noisy: in {noisy} of" in printed and "run this command again" in printed
    assert "mislead" not in take(again := Engine())
    steps = [point for point in engine.asked if isinstance(point, StepPoint)]
    assert again.asked == steps[:noisy]


def test_a_used_up_budget_leaves_a_profile_of_every_layout(
    take: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=count(0, 2).__next__))
    printed = " ".join(take(engine := Engine(), 1).split())
    assert engine.asked == [*PLAN.points[: PLAN.essential]]
    assert f"{len(PLAN.points) - PLAN.essential} of {len(PLAN.points)} points" in printed
    assert {sample.layout for sample in Profile.load(tmp_path / "p.json").steps} == {
        *LIMITS.layouts
    }


def test_another_engines_file_is_left_alone(take: Any, tmp_path: Path) -> None:
    take(Engine())
    before = (tmp_path / "p.json").read_text()
    with pytest.raises(ProfileError, match=r"ranks is 4 here and 2 in.*another --output"):
        take(Engine(ranks=4))
    assert (tmp_path / "p.json").read_text() == before

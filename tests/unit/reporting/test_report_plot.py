"""Pictures of what an engine did."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pat_vllm.layout import Layout
from pat_vllm.reporting import (
    BatchReport,
    DecisionReport,
    DraftCounts,
    DraftSample,
    LiveSample,
    PredictorReport,
    Report,
    Run,
    report_plot,
)
from tests.unit.reporting.samples import switch_report

ONE, TWO, FOUR = Layout(1, 4), Layout(2, 2), Layout(4, 1)
BEGAN = 100.0


def report_to_draw() -> Report:
    """Two batches. The engine switches twice in the first, once in the second."""
    timeline = [LiveSample(BEGAN - 5.0, ONE, 0)]
    for start, wide_at in ((0.0, 6.0), (20.0, 28.0)):
        for step in range(20):
            at, live = start + 0.5 * step, max(1, 64 >> step // 3)
            layout = FOUR if at >= wide_at else TWO if 4 <= at < 6 else ONE
            each, left = divmod(live, layout.replicas)
            by_replica = (each + left, *[each] * (layout.replicas - 1))
            sample = LiveSample(BEGAN + at, layout, live, by_replica if each < live else ())
            timeline.append(sample)
    switches = (
        switch_report(BEGAN + 3.75, ONE, TWO, "policy", 16),
        switch_report(BEGAN + 5.75, TWO, FOUR, "policy", 4),
        switch_report(BEGAN + 10.75, FOUR, ONE, "idle", 0),
        switch_report(BEGAN + 27.75, ONE, FOUR, "forced", 4),
    )
    decisions = tuple(
        DecisionReport(
            *(s.at, s.source, s.target, 8, 9.0, 7.5, 0.2, True, "plan", 0.03, 0.02),
            real_after=after,
        )
        for s, after in zip(switches[:2], (0.025, None), strict=True)
    )
    batches = tuple(BatchReport(BEGAN + at, 10.25, 64, 900) for at in (10.25, 30.25))
    drafts = tuple(
        DraftSample(BEGAN + at, ONE, 0, at % 5, 10, DraftCounts(40 * (at % 5), 20 * (at % 5)))
        for at in range(30)
        if not 11 < at < 20
    )
    return Report(
        *(ONE, (ONE, TWO, FOUR), switches, (), tuple(timeline)),
        predictor=PredictorReport(decisions=decisions),
        drafts=drafts,
        batches=batches,
    )


def drawn(report: Report, monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The panels of the picture, from above; behind them second axes of the same."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: figures.append(self))
    report.plot("unused.png")
    (figure,) = figures
    return figure.axes


def lines_of(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))  # type: ignore[arg-type]
        for line in axes.lines
    }


def test_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    above, drafts, costs, _ = drawn(report_to_draw(), monkeypatch)
    lines = lines_of(above)
    counts = dict(zip(*lines["live requests"], strict=True))
    assert counts[0.0] == 64 and counts[20.0] == 64
    # The engine is idle between batches: the batch ended, or it went back.
    assert counts[10.25] == report_plot.FLOOR
    assert lines["of each replica"][1][1] == 16
    assert len(above.texts) == 3, "a word at each switch but the way back"
    shown: list[Any] = above.patches[:5]
    bounds = [(bar.get_x(), bar.get_width()) for bar in shown]
    # A layout lasts until a switch, also while there is no request.
    assert bounds == [(0.0, 3.75), (3.75, 2.0), (5.75, 5.0), (10.75, 17.0), (27.75, 2.5)]
    assert drafts.get_ylabel() == "draft length k"
    points = lines_of(costs)
    assert points["switch: what it took"][1] == [0.25] * 3
    assert points["step after a switch: predicted"][1] == [0.02] * 2
    assert points["step after a switch: real"] == ([3.75], [0.025])


def test_what_is_not_known_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timeline = (LiveSample(BEGAN, ONE, 1), LiveSample(BEGAN + 2, ONE, 0))
    with pytest.raises(ValueError, match="no requests to draw"):
        Report(ONE, (ONE,), (), (), timeline[1:]).plot(tmp_path / "rollout.png")
    (only,) = drawn(Report(ONE, (ONE,), (), (), timeline), monkeypatch)
    assert set(lines_of(only)) == {"live requests"}


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, picture = tmp_path / "report.json", tmp_path / "report.png"
    report_to_draw().save(path)
    report = Report.load(path)
    report.plot(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="doc"):
        report.plot(tmp_path / "rollout.doc")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it was not installed
    with pytest.raises(ImportError, match=r"pip install 'pat-vllm\[plot\]'"):
        report.plot(picture)


def test_several_runs_of_one_batch(tmp_path: Path) -> None:
    """Also of one that has no drafts, or no switches."""
    report = report_to_draw()
    switching = Run(report, BEGAN, 12.0)
    still = Run(dataclasses.replace(report, switches=(), drafts=()), BEGAN, 11.0)
    for runs in ((still, switching), (switching, still)):
        picture = tmp_path / "runs.png"
        report_plot.plot_runs("two", [(str(i), "said", run) for i, run in enumerate(runs)], picture)
        assert picture.read_bytes().startswith(b"\x89PNG")
        picture.unlink()

"""What an engine did, as a file and as a picture."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from typer.testing import CliRunner

from pat_vllm.cli import app
from pat_vllm.layout import Layout
from pat_vllm.reporting import (
    BatchSavings,
    BatchTimes,
    DecisionReport,
    DraftSample,
    History,
    LiveSample,
    PredictorReport,
    Report,
    SwitchReport,
    plot,
)
from pat_vllm.reporting.values import FORMAT
from tests.support.mutation import mutated

ONE, TWO, FOUR = Layout(1, 4), Layout(2, 2), Layout(4, 1)
BEGAN = 100.0


def a_switch(at: float, source: Layout, target: Layout, live: int, reason: str) -> SwitchReport:
    times: Any = [0.25, *[0.0] * 8]
    return SwitchReport(BEGAN + at, source, target, reason, live, live, 0, 5_000, *times)


def a_report() -> Report:
    """Two batches. The engine switches twice in the first, once in the second."""
    timeline: list[LiveSample] = [LiveSample(BEGAN - 5.0, ONE, 0)]
    for start, wide_at in ((0.0, 6.0), (20.0, 28.0)):
        for step in range(20):
            at, live = start + 0.5 * step, max(1, 64 >> step // 3)
            layout = FOUR if at >= wide_at else TWO if 4 <= at < 6 else ONE
            each = live // layout.replicas
            by_replica = (live - each * (layout.replicas - 1), *[each] * (layout.replicas - 1))
            by_replica = by_replica if layout.replicas > 1 else ()
            timeline.append(LiveSample(BEGAN + at, layout, live, by_replica))
    switches = (
        a_switch(3.75, ONE, TWO, 16, "policy"),
        a_switch(5.75, TWO, FOUR, 4, "policy"),
        a_switch(10.75, FOUR, ONE, 0, "idle"),
        a_switch(27.75, ONE, FOUR, 4, "forced"),
    )
    decisions = tuple(
        DecisionReport(s.at, s.source, s.target, 8, 9.0, go, 0.2, fired, "saving", 0.03, 0.02)
        for s, go, fired in zip(switches[:2], (7.5, 8.6), (True, True), strict=True)
    )
    savings = tuple(
        BatchSavings(BEGAN + at, ONE, BatchTimes(14.0, 11.0, 10.0), BatchTimes(14.5, 11.5, real))
        for at, real in ((10.25, 10.4), (30.25, 14.6))
    )
    drafts = tuple(
        DraftSample(BEGAN + at, ONE, 0, int(at) % 5, 10, 40 * (int(at) % 5), 20 * (int(at) % 5))
        for at in range(30)
        if not 11 < at < 20
    )
    predictor = PredictorReport(decisions=decisions, savings=savings)
    return Report(
        ONE, (ONE, TWO, FOUR), switches, (), tuple(timeline), predictor=predictor, drafts=drafts
    )


# ---------------------------------------------------------------- the file


def check_kept(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("what was there before")
    before = path.stat().st_ino
    report = a_report()
    report.save(path)
    assert Report.load(path) == report
    assert path.stat().st_ino != before  # replaced, not overwritten
    assert os.listdir(tmp_path) == ["report.json"]
    content = json.loads(path.read_text())
    assert content["format"] == FORMAT
    assert content["timeline"][1]["by_replica"] == [16, 16, 16, 16]
    # Another version's is told apart before anything of it is read.
    path.write_text(json.dumps({"format": FORMAT + 1}))
    with pytest.raises(ValueError, match=rf"format {FORMAT + 1}, this version reads {FORMAT}"):
        Report.load(path)


def test_it_is_kept(tmp_path: Path) -> None:
    check_kept(tmp_path)


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (Report.save, {"write_whole(Path(path), ": "Path(path).write_text("}),
        (Report.load, {'content["format"] != FORMAT': "False"}),
    ],
    ids=["overwritten", "any format"],
)
def test_mistakes_are_seen(function: Any, changes: dict[str, str], tmp_path: Path) -> None:
    seen = (AssertionError, pytest.fail.Exception)
    with mutated(function, changes), pytest.raises(seen):
        check_kept(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no JSON"),
        (b"{", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1, 2]", "is no report"),
        (b'{"title": "a bench result"}', "is no report"),
        (b'{"format": 1}', "is damaged: layout: Field required"),
        (b'{"format": 1, "layout": "tp0dp1", "layouts": []}', "is damaged: layout"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_bad_file_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        Report.load(path)
    assert str(path) in str(error.value)
    outcome = CliRunner().invoke(app, ["plot", str(path)], env={"COLUMNS": "300"})
    assert outcome.exit_code == 2
    assert words in outcome.output
    assert not path.with_suffix(".png").exists()


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    a_report().save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="is no JSON"):
        Report.load(path)


def test_it_is_readable_by_whom_the_user_lets(tmp_path: Path) -> None:
    """Unlike what PAT keeps by itself: a report is made to be shown."""
    path = tmp_path / "report.json"
    umask = os.umask(0o027)
    try:
        a_report().save(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


# ---------------------------------------------------------------- what is known


def test_replicas_in_the_history() -> None:
    history = History()
    for by_replica in ((2, 1), (2, 1), (1, 2), (1, 1)):
        history.live(TWO, sum(by_replica), by_replica)
    report = history.report(TWO, (ONE, TWO))
    assert [s.by_replica for s in report.timeline] == [(2, 1), (1, 2), (1, 1)]
    assert Report.from_json(report.to_json()) == report
    # Reports of before have no such numbers.
    older = json.loads(report.to_json())
    for sample in older["timeline"]:
        del sample["by_replica"]
    assert Report.from_json(json.dumps(older)).timeline[0].by_replica == ()


# ---------------------------------------------------------------- the picture


def drawn(report: Report, monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The panels of the picture, from above; behind them second axes of the same."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **options: figures.append(self))
    report.plot("unused.png")
    (figure,) = figures
    return figure.axes


def legend_of(axes: Axes) -> list[str]:
    """What the picture's legend names."""
    (legend,) = axes.get_figure(root=True).legends  # type: ignore[union-attr]
    return [text.get_text() for text in legend.get_texts()]


def lines_of(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))  # type: ignore[arg-type]
        for line in axes.lines
    }


def check_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    report = a_report()
    above, drafts, costs, _ = drawn(report, monkeypatch)
    lines = lines_of(above)
    at, live = lines["live requests"]
    counts = dict(zip(at, live, strict=True))
    assert counts[0.0] == 64 and counts[20.0] == 64
    # The engine is idle between batches: the batch ended, or it went home.
    assert counts[10.25] == plot.FLOOR
    assert "of each replica" in lines
    assert lines["of each replica"][1][1] == 16
    bands = legend_of(above)
    assert len(bands) == 9
    assert [b.split(":")[0] for b in bands[-3:]] == [f"layout {one}" for one in (ONE, TWO, FOUR)]
    notes = [text.get_text() for text in above.texts]
    assert notes == [
        "tp1dp4 → tp2dp2\n16 live, 250 ms",
        "tp2dp2 → tp4dp1\n4 live, 250 ms",
        "tp1dp4 → tp4dp1\n4 live, 250 ms",
    ]
    assert drafts.get_ylabel() == "draft length k"
    points = lines_of(costs)
    assert points["switch: what it took"][1] == [0.25] * 3
    assert points["switch: predicted saving, its cost paid"][1] == pytest.approx([1.5, 0.4])
    assert points["batch: predicted saving"][1] == [4.0, 4.0]
    assert points["batch: saving as it came (estimated)"][1] == pytest.approx([4.1, -0.1])


def test_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    check_contents(monkeypatch)


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (plot.plot_report, {"live += [(one.at - began, 0) for one in savings]": "pass"}),
        (plot.plot_report, {'and one.reason != "idle"': ""}),
        (plot._draw_costs, {"b.realised.fixed - b.realised.drafting": "b.realised.drafting"}),
        (plot._spans, {"seen += ": "_ = "}),
        (plot._draw_replicas, {"sample.by_replica[replica]": "sample.num_seqs"}),
    ],
)
def test_wrong_pictures_are_seen(
    function: Any, changes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with mutated(function, changes), pytest.raises((AssertionError, KeyError)):
        check_contents(monkeypatch)
        spans = plot._spans(a_report(), BEGAN, 30.25)
        assert (ONE, 10.75, 27.75) in spans


def test_layouts_over_time() -> None:
    """A layout lasts until a switch, also while there is no request."""
    assert plot._spans(a_report(), BEGAN, 30.25) == [
        (ONE, 0.0, 3.75),
        (TWO, 3.75, 5.75),
        (FOUR, 5.75, 10.75),
        (ONE, 10.75, 27.75),
        (FOUR, 27.75, 30.25),
    ]


def test_parts_that_are_not_known_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = (LiveSample(BEGAN, ONE, 1), LiveSample(BEGAN + 2, ONE, 0))
    (only,) = drawn(Report(ONE, (ONE,), (), (), timeline), monkeypatch)
    assert only.get_xlim() == (0, 2)
    assert set(lines_of(only)) == {"live requests"}
    # With many switches, none is described in words.
    many = tuple(a_switch(one, ONE, TWO, 3, "policy") for one in range(20))
    above, _ = drawn(replace(a_report(), switches=many, drafts=(), timeline=timeline), monkeypatch)
    assert not above.texts


@pytest.mark.parametrize("timeline", [(), (LiveSample(1.0, ONE, 0),)])
def test_nothing_to_draw(timeline: Any, tmp_path: Path) -> None:
    report = Report(ONE, (ONE,), (), (), timeline)
    with pytest.raises(ValueError, match="no requests to draw"):
        report.plot(tmp_path / "rollout.png")


def test_summary() -> None:
    assert plot.summary(a_report()) == (
        "64 requests at most, 4 ranks, 30.2 s; 3 switches in 0.75 s; saved 4.0 of 29.0 s in "
        "tp1dp4 without drafts (estimated; predicted 8.0 s)"
    )


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize("output", [None, "rollout.png", "rollout.svg"])
def test_command(output: str | None, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    a_report().save(path)
    picture = tmp_path / (output or "report.png")
    options = ["--output", str(picture)] if output else []
    outcome = CliRunner().invoke(app, ["plot", str(path), *options])
    assert outcome.exit_code == 0, outcome.output
    assert "3 switches in 0.75 s" in outcome.output and picture.name in outcome.output
    start = b"<?xml" if picture.suffix == ".svg" else b"\x89PNG"
    assert picture.read_bytes().startswith(start) and picture.stat().st_size > 10_000


def test_an_unknown_kind_of_picture(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    a_report().save(path)
    picture = tmp_path / "rollout.doc"
    outcome = CliRunner().invoke(app, ["plot", str(path), "--output", str(picture)])
    assert outcome.exit_code == 2 and "doc" in outcome.output
    assert not picture.exists()


WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None  # as if it was not installed
from pat_vllm.cli import app
app(sys.argv[1:])
"""


def test_without_matplotlib(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    a_report().save(path)
    command = [sys.executable, "-c", WITHOUT_MATPLOTLIB, "plot", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'matplotlib" in done.stderr
    assert "Traceback" not in done.stderr

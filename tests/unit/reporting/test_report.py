"""A report travels as JSON, is kept in a file, and is asked for by users."""

from __future__ import annotations

import json
import math
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from pat_vllm.reporting import (
    BatchReport,
    ControlComparison,
    DraftCounts,
    DraftSample,
    LayoutSteps,
    LiveSample,
    PredictorReport,
    RefusedSwitch,
    Report,
)
from pat_vllm.reporting.values import FORMAT
from tests.unit.reporting.samples import ONE, TWO, decision_report, switch_report

PREDICTOR = PredictorReport(
    (
        replace(decision_report(0.1 + 0.2), no_switch=math.inf, switch_now=-math.inf, cost=5e-324),
        replace(decision_report(0.9), real_before=0.031, real_after=0.022),
    ),
    {ONE: (7, 0.03)},
)
REPORT = Report(
    TWO,
    (ONE, TWO),
    (switch_report(1.0), replace(switch_report(2.0, TWO, ONE, "idle"), first_step=0.5)),
    (RefusedSwitch(3.0, TWO, ONE, "because", reason="asleep"),),
    (LiveSample(1e300, ONE, 2**40), LiveSample(4.0, ONE, 5, (3, 2))),
    {ONE: LayoutSteps(3, 0.125, {0: 0.5, 4: 0.25})},
    PREDICTOR,
    errors=2,
    drafts=(DraftSample(3.5, ONE, 0, 4, 3, DraftCounts(12, 6)),),
    batches=(BatchReport(2.0, 1.5, 8, 800, 1), BatchReport(3.5, 1.0, 8, 900, 0, True)),
    control=ControlComparison(3, 0.93, 0.9, 0.96),
)


def test_a_report_survives_json_and_pickle() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pydantic warns of a value that has not its field's type
        text = REPORT.to_json()
    assert Report.from_json(text) == pickle.loads(pickle.dumps(REPORT)) == REPORT
    values = json.loads(text)
    assert values["layouts"] == ["tp1dp2", "tp2dp1"] and list(values["steps"]) == ["tp1dp2"]
    odd = replace(REPORT, predictor=PredictorReport(slowest_plan=math.nan))
    assert math.isnan(Report.from_json(odd.to_json()).predictor.slowest_plan)
    del values["timeline"][1]["by_replica"]  # as in older versions
    assert Report.from_json(json.dumps(values)).timeline[1].by_replica == ()


def test_a_report_is_shown_in_lines() -> None:
    """Switches, refused ones and batches in the order of time; of thousands the last."""
    report = replace(REPORT, timeline=(LiveSample(0.5, ONE, 8), LiveSample(4.0, TWO, 0)))
    assert str(report).splitlines() == [
        "8 requests at most, 2 ranks, 3.5 s; 1 switch in 0.25 s",
        "  decided for tp2dp1 at 0.40 s (plan): a step from 30.0 to 20.0 ms predicted, from 31.0 "
        "to 22.0 ms measured",
        "  tp1dp2 -> tp2dp1 at 0.50 s, 4 live, 250 ms (policy)",
        "  tp2dp1 -> tp1dp2 at 1.50 s, 4 live, 250 ms (idle)",
        "  batch ended at 1.50 s: 8 responses, 800 tokens in 1.50 s",
        "  no switch to tp1dp2 at 2.50 s: because",
        "  batch ended at 3.00 s: 8 responses, 900 tokens in 1.00 s, a control batch",
        "  steps became faster or slower as predicted after 100% of the switches",
        "  batches that may switch take 0.930 (0.900 to 0.960) of the time per token of 3 control "
        "batches",
        "  now in tp2dp1; steps since the start: 3 in tp1dp2 (0.4 s, median 125.0 ms; k 0 0.2 s, "
        "k 4 0.1 s)",
        "  2 switches failed to plan: see the engine's log",
    ]
    assert "no requests yet, 2 ranks" in str(Report(ONE, (ONE, TWO), (), (), ()))
    many = replace(report, switches=tuple(switch_report(1.0 + i) for i in range(10_000)))
    lines = str(many).splitlines()
    assert len(lines) == 46 and lines[1] == "  (9964 earlier lines are left out)"
    assert len(repr(many)) < 120 and "10000 switches" in repr(many)
    assert len(Report.from_json(many.to_json()).switches) == 10_000


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("what was there before")
    before = path.stat().st_ino
    REPORT.save(path)
    assert Report.load(path) == REPORT
    assert path.stat().st_ino != before and os.listdir(tmp_path) == ["report.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"format": 2}', f"format 2, this version reads {FORMAT}"),
        (b'{"format": 1, "layout": "tp0dp1", "layouts": []}', "is damaged: layout"),
        (None, "cannot be read: No such file"),
    ],
    ids=["format", "a layout", "missing"],
)
def test_a_bad_file_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        Report.load(path)
    assert str(path) in str(error.value)

"""The report survives vLLM's message format and pickling; a rollout survives its absence."""

import asyncio
import json
import pickle
from dataclasses import replace

from pat_vllm import reporting
from pat_vllm.layout import Layout
from pat_vllm.reporting import (
    DecisionReport,
    History,
    PredictorReport,
    RefusedSwitch,
    Report,
    SwitchReport,
)

ONE, TWO = Layout(1, 2), Layout(2, 1)


def history():
    history = History()
    history.live(ONE, 5)
    history.live(ONE, 5)
    history.live(ONE, 4)
    history.step(ONE, 0.25)
    history.switch(
        SwitchReport(
            at=1.0,
            source=ONE,
            target=TWO,
            reason="policy",
            num_seqs=4,
            migrated=3,
            recomputed=1,
            kv_bytes=100,
            seconds=0.08,
            quiesce=0.01,
            plan=0.01,
            states=0.01,
            kv=0.01,
            weights=0.01,
            activate=0.01,
            rpc=0.01,
            finish=0.01,
            tokens=2000,
        )
    )
    history.refused(RefusedSwitch(2.0, TWO, ONE, "because"))
    history.step(TWO, 0.5)
    history.step(TWO, 0.125)
    history.step(TWO, 0.125)
    return history


def test_wire_round_trip():
    decision = DecisionReport(1.0, ONE, TWO, 4, 2.0, 1.5, 0.1, True, "saving", 0.03, 0.02)
    predictor = PredictorReport((decision,), {ONE: (7, 0.03)}, plans=3, planning=1e-3)
    report = replace(history().report(TWO, [ONE, TWO]), predictor=predictor)
    assert Report.from_wire(json.loads(json.dumps(report.to_wire()))) == report
    assert pickle.loads(pickle.dumps(report)) == report


def test_history_keeps_changes_and_first_steps():
    report = history().report(TWO, [ONE, TWO])
    assert [(s.layout, s.num_seqs) for s in report.timeline] == [(ONE, 5), (ONE, 4)]
    assert report.switches[0].first_step == 0.5
    assert report.steps[TWO].steps == 3
    assert report.steps[TWO].median == 0.125
    assert report.steps[TWO].seconds == 0.75


def line(report):
    return asyncio.run(reporting.describe_awaited(report, 0.0, 2.5, 8))


def test_a_rollout_is_described_when_its_report_has_come():
    async def arrives():
        return history().report(TWO, [ONE, TWO])

    assert line(arrives()).startswith("8 responses in 2.50 s; tp1dp2 -> tp2dp1 at 1.00 s")


def test_a_rollout_does_without_a_report(monkeypatch):
    async def fails():
        raise RuntimeError("no engine")

    async def never_comes():
        await asyncio.Event().wait()

    monkeypatch.setattr(reporting, "REPORT_SECONDS", 0.01)
    for report, why in ((fails, "RuntimeError('no engine')"), (never_comes, "TimeoutError()")):
        assert line(report()) == f"8 responses in 2.50 s; no report of the engine: {why}"

"""The report survives vLLM's message format and pickling."""

import json
import pickle

from pat_vllm.layout import Layout
from pat_vllm.reporting import RefusedSwitch, Report, SwitchReport
from pat_vllm.scheduler.history import History

ONE, TWO = Layout(1, 2), Layout(2, 1)


def history():
    history = History()
    history.live(ONE, 5)
    history.live(ONE, 5)
    history.live(ONE, 4)
    history.step(ONE, 0.25)
    history.switch(
        SwitchReport(1.0, ONE, TWO, "policy", 4, 3, 1, 100, *(0.01 * i for i in range(9)))
    )
    history.refused(RefusedSwitch(2.0, TWO, ONE, "because"))
    history.step(TWO, 0.5)
    history.step(TWO, 0.125)
    history.step(TWO, 0.125)
    return history


def test_wire_round_trip():
    report = history().report(TWO, [ONE, TWO])
    assert Report.from_wire(json.loads(json.dumps(report.to_wire()))) == report
    assert pickle.loads(pickle.dumps(report)) == report


def test_history_keeps_changes_and_first_steps():
    report = history().report(TWO, [ONE, TWO])
    assert [(s.layout, s.live) for s in report.timeline] == [(ONE, 5), (ONE, 4)]
    assert report.switches[0].first_step == 0.5
    assert report.steps[TWO].steps == 3
    assert report.steps[TWO].median == 0.125
    assert report.steps[TWO].seconds == 0.75

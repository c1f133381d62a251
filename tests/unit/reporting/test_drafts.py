"""The history of drafts in the report."""

from __future__ import annotations

import pytest

from pat_vllm.layout import Layout
from pat_vllm.reporting import History, Report
from pat_vllm.reporting import history as history_module

ONE, TWO = Layout(1, 2), Layout(2, 1)


def test_history_of_drafts() -> None:
    """Steps of a replica with one length and in one layout count together, for a second."""
    history = History()
    for at, layout, replica, length, drafted, accepted in [
        (1.0, ONE, 0, 4, 0, 0),
        (1.1, ONE, 1, 4, 4, 1),
        (1.2, ONE, 0, 4, 8, 5),
        (1.9, ONE, 0, 4, 8, 8),
        (2.1, ONE, 0, 4, 4, 2),  # more than a second after the first
        (2.2, ONE, 0, 2, 4, 3),  # another length
        (2.3, TWO, 0, 2, 2, 2),  # another layout
    ]:
        history.drafts(at, layout, replica, length, drafted, accepted)
    samples = history.report(TWO, [ONE, TWO]).drafts
    assert [
        (s.at, s.layout, s.replica, s.num_speculative_tokens, s.steps, s.drafted, s.accepted)
        for s in samples
    ] == [
        (1.0, ONE, 0, 4, 3, 16, 13),
        (1.1, ONE, 1, 4, 1, 4, 1),
        (2.1, ONE, 0, 4, 1, 4, 2),
        (2.2, ONE, 0, 2, 1, 4, 3),
        (2.3, TWO, 0, 2, 1, 2, 2),
    ]
    report = history.report(TWO, [ONE, TWO], since=2.15)
    assert report.drafts == samples[3:]
    assert Report.from_json(report.to_json()) == report


def test_the_history_of_drafts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "MAX_RECORDS", 3)
    history = History()
    for at in range(10):
        history.drafts(float(at), ONE, 0, 4, 4, at)
    assert [one.at for one in history.report(ONE, [ONE]).drafts] == [6.0, 7.0, 8.0, 9.0]

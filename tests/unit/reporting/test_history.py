"""The history behind a report: bounded, complete, and read while it grows."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import replace

import pytest

from pat_vllm.layout import Layout
from pat_vllm.profile import StepShape
from pat_vllm.reporting import (
    BatchReport,
    DraftCounts,
    DraftSample,
    EngineHistory,
    RefusedSwitch,
)
from pat_vllm.reporting import history as history_module
from pat_vllm.reporting.decisions import MAX_DECISIONS, Decisions
from pat_vllm.reporting.history import MAX_RECORDS
from pat_vllm.reporting.run import drafts_over_time
from tests.unit.reporting.samples import ONE, TWO, decision_report, switch_report

STEP = StepShape(batch=1, context=8, longest=8)


def test_changes_and_first_steps_are_kept() -> None:
    history = EngineHistory()
    for by_replica in ((3, 2), (3, 2), (2, 3), (2, 2)):
        history.live(ONE, sum(by_replica), by_replica)
    history.stepped(0.0, ONE, STEP, 0.25)
    for at in (1.0, 2.0):
        history.switched(switch_report(at))
    history.refused(RefusedSwitch(2.5, TWO, ONE, "because", "asleep"))
    for seconds, draft_length in ((0.5, 0), (0.125, 4), (0.125, 4)):
        history.stepped(3.0, TWO, replace(STEP, k=draft_length), seconds)
    report = history.report(TWO, [ONE, TWO])
    assert [sample.by_replica for sample in report.timeline] == [(3, 2), (2, 3), (2, 2)]
    assert [switch.first_step for switch in report.switches] == [None, 0.5]
    steps = report.steps[TWO]
    assert (steps.steps, steps.seconds, steps.median) == (3, 0.75, 0.125)
    assert steps.by_draft_length == {0: 0.5, 4: 0.25}
    assert (len(report.refused), report.errors) == (1, 0)


def test_a_batch_lasts_from_its_first_arrival_to_its_last_response() -> None:
    control = False
    history = EngineHistory(control=lambda: control)
    assert history.end_batch() is None
    for control in (False, True):
        history.arrived(10.0)
        history.arrived(11.0)
        history.switched(switch_report(12.0))
        history.ended(14.0, 30, True)
        closed = history.report(ONE, [ONE]).batches
        history.ended(15.5, 70, None)
        ended = BatchReport(15.5, 5.5, 2, 100, 1, control)
        going_on = history.report(ONE, [ONE]).batches
        assert going_on == (*closed, ended), "between two turns it is told of as far as it got"
        assert history.end_batch() == ended
        history.switched(switch_report(16.0, TWO, ONE, "idle"))
        assert history.report(ONE, [ONE]).batches[-1] == ended
    assert len(history.report(ONE, [ONE], since=15.0).batches) == 2
    assert not history.report(ONE, [ONE], since=16.0).batches


def test_a_long_history_is_bounded_and_is_sent_since_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record of each kind every second, from 0 s on, and more than fit."""
    now = 0.0
    monkeypatch.setattr(history_module.time, "monotonic", lambda: now)
    history = EngineHistory()
    for second in range(MAX_RECORDS + 10):
        now = float(second)
        history.live(ONE, second)
        history.switched(switch_report(now))
        reason = "asleep" if second % 2 else "planning_failed"
        history.refused(RefusedSwitch(now, TWO, ONE, "KeyError('r1')", reason))
        history.stepped(now, ONE, STEP, 0.5)
        history.drafted(now, ONE, 0, 4, DraftCounts(4, second % 4))
    last = MAX_RECORDS + 9.0
    for since, times in (
        (last - 2, [last - 2, last - 1, last]),
        (last - 1.5, [last - 1, last]),
        (last + 1, []),
        (-math.inf, [float(second) for second in range(10, MAX_RECORDS + 10)]),
    ):
        report = history.report(ONE, [ONE, TWO], since)
        for records in (report.switches, report.refused, report.timeline):
            assert [record.at for record in records] == times
        assert len(report.drafts) <= MAX_RECORDS + 1  # one is not complete
        # Totals stay whole.
        assert report.steps[ONE].steps == MAX_RECORDS + 10
        assert report.errors == MAX_RECORDS / 2 + 5
    assert len(history.report(ONE, [ONE, TWO], last - 9).to_json()) < 20_000


def test_drafts_of_two_batches_are_counted_apart() -> None:
    history = EngineHistory()
    for at, layout, replica, length, drafted, accepted in (
        (10.1, ONE, 1, 4, 8, 3),
        (10.2, ONE, 0, 4, 16, 7),
        (10.3, ONE, 0, 1, 4, 4),  # another length
        (10.4, TWO, 0, 1, 4, 2),  # another layout
        (11.2, ONE, 1, 4, 8, 2),  # more than a second after the first
        (11.3, ONE, 1, 4, 8, 1),
    ):
        history.drafted(at, layout, replica, length, DraftCounts(drafted, accepted))
    history.idle(11.4)
    history.drafted(11.4, ONE, 1, 4, DraftCounts(8, 8, 5, 4))
    assert history.report(ONE, [ONE]).drafts == (
        DraftSample(10.1, ONE, 1, 4, 1, DraftCounts(8, 3)),
        DraftSample(10.2, ONE, 0, 4, 1, DraftCounts(16, 7)),
        DraftSample(10.3, ONE, 0, 1, 1, DraftCounts(4, 4)),
        DraftSample(10.4, TWO, 0, 1, 1, DraftCounts(4, 2)),
        DraftSample(11.2, ONE, 1, 4, 2, DraftCounts(16, 3)),
        DraftSample(11.4, ONE, 1, 4, 1, DraftCounts(8, 8, 5, 4)),
    )
    assert [sample.at for sample in history.report(ONE, [ONE], since=11.3).drafts] == [11.4]


def test_drafts_over_time() -> None:
    """Means of as many steps as there were, by second."""
    samples = (
        DraftSample(11.9, ONE, 0, 7, 10, DraftCounts(70, 70)),  # before
        DraftSample(12.2, ONE, 0, 4, 10, DraftCounts(40, 20)),
        DraftSample(12.9, ONE, 1, 0, 30, DraftCounts(0, 0)),
        DraftSample(14.5, ONE, 0, 0, 9, DraftCounts(0, 0)),
        DraftSample(15.1, TWO, 0, 2, 5, DraftCounts(10, 1)),
    )
    means = drafts_over_time(samples, 12.0, 1.0)
    assert [(mean.start, mean.num_speculative_tokens, mean.acceptance) for mean in means] == [
        (0.0, 1.0, 0.5),
        (2.0, 0.0, None),
        (3.0, 2.0, 0.1),
    ]


def test_decisions_are_bounded_and_completed_by_what_follows() -> None:
    """However many were nearly made since, until it is not kept any more."""
    decisions = Decisions()
    decisions.add(decision_report(0.0))
    for at in range(1, MAX_DECISIONS):
        decisions.add(decision_report(float(at), fired=False, why="later"))
    decisions.switched(switch_report(1.0, seconds=0.08))
    fired, *others = decisions.records.since()
    assert fired.real_cost == pytest.approx(0.07)  # less the time to drain steps in flight
    assert decisions.records.since(MAX_DECISIONS - 1.5) == tuple(others[-1:])
    decisions.add(decision_report(1e4, fired=False, why="later"))
    decisions.switched(switch_report(1.0))
    assert decisions.records.since()[:-1] == tuple(others)


def test_a_history_is_read_while_it_grows() -> None:
    history = EngineHistory()
    layouts = [Layout(1, 1 + replicas) for replicas in range(500)]
    read, failed = threading.Event(), []

    def write() -> None:
        try:
            for index, layout in enumerate(layouts):
                if index == 250:
                    read.wait()
                for _ in range(3):
                    history.stepped(float(index), layout, STEP, 1.0)
                history.switched(switch_report(float(index)))
                history.drafted(float(index), ONE, 0, 4, DraftCounts(8, 8))
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    writer = threading.Thread(target=write)
    try:
        writer.start()
        while writer.is_alive():
            report = history.report(ONE, [ONE], since=0.0)
            # Of each layout a sum and a count that belong together; of each record all.
            assert all(steps.seconds == steps.steps for steps in report.steps.values())
            for records in (report.switches, report.drafts):
                assert [record.at for record in records] == list(range(len(records)))
            read.set()
    finally:
        read.set()
        writer.join()
        sys.setswitchinterval(interval)
    assert not failed, failed
    assert sum(steps.steps for steps in history.report(ONE, [ONE]).steps.values()) == 1_500

"""The report survives its way and threads; a rollout survives a report that does not come."""

import asyncio
import json
import math
import pickle
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pat_vllm
from pat_vllm.layout import Layout
from pat_vllm.predictor.decisions import MAX_DECISIONS, Decisions
from pat_vllm.reporting import (
    MAX_RECORDS,
    BatchSavings,
    BatchTimes,
    DecisionReport,
    DraftSample,
    History,
    LiveSample,
    PredictorReport,
    RefusedSwitch,
    Report,
    SwitchReport,
    describe_awaited,
    drafts_over_time,
    rollout,
)
from pat_vllm.reporting import history as history_module
from tests.support.mutation import mutated

ONE, TWO = Layout(1, 2), Layout(2, 1)


def a_switch(at: float) -> SwitchReport:
    return SwitchReport(
        at=at,
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


def a_decision(at: float, fired: bool = True, why: str = "saving") -> DecisionReport:
    return DecisionReport(at, ONE, TWO, 4, 2.0, 1.5, 0.1, fired, why, 0.03, 0.02)


def history() -> History:
    history = History()
    history.live(ONE, 5)
    history.live(ONE, 5)
    history.live(ONE, 4)
    history.step(ONE, 0.25)
    history.switch(a_switch(1.0))
    history.refused(RefusedSwitch(2.0, TWO, ONE, "because"))
    history.step(TWO, 0.5)
    history.step(TWO, 0.125)
    history.step(TWO, 0.125)
    return history


# ---------------------------------------------------------------- JSON


def test_json_round_trip():
    saved = BatchSavings(2.0, ONE, BatchTimes(3.0, 2.5, 1.5), BatchTimes(3.0, 2.0, 1.0))
    predictor = PredictorReport(
        (a_decision(1.0),),
        {ONE: (7, 0.03)},
        plans=3,
        planning=1e-3,
        savings=(saved,),
    )
    report = replace(history().report(TWO, [ONE, TWO]), predictor=predictor, errors=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pydantic warns of a value that has not its field's type
        text = report.to_json()
    assert Report.from_json(text) == report
    assert pickle.loads(pickle.dumps(report)) == report
    values = json.loads(text)
    assert values["layouts"] == ["tp1dp2", "tp2dp1"]
    assert list(values["steps"]) == ["tp1dp2", "tp2dp1"]


def test_numbers_arrive_as_they_were():
    """Not finite ones, too, deep within the report."""
    odd = replace(a_decision(0.1 + 0.2), stay=math.inf, go=-math.inf, cost=5e-324)
    predictor = PredictorReport((odd,), slowest_plan=math.nan)
    report = Report(ONE, (ONE,), (), (), (LiveSample(1e300, ONE, 2**40),), predictor=predictor)
    arrived = Report.from_json(report.to_json())
    assert arrived.predictor.decisions == (odd,)
    assert math.isnan(arrived.predictor.slowest_plan)
    assert arrived.timeline == report.timeline


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"layout": "tp0dp1", "layouts": []}'])
def test_what_is_no_report_is_a_value_error(text: str):
    with pytest.raises(ValueError):
        Report.from_json(text)


@pytest.mark.parametrize("layout", [ONE, Layout(16, 128), Layout(2, 4, "ep")])
def test_a_layout_is_known_by_its_name(layout: Layout):
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "name",
    [
        "",
        "tp2",
        "tp2dp",
        "tp2dp4 ",
        "TP2dp4",
        "tp-1dp2",
        "tp0dp2",
        "tp²dp1",
        "tp2dp4tp",
        "tp1dp2ep",
    ],
)
def test_not_a_layout(name: str):
    with pytest.raises(ValueError, match="layout"):
        Layout.parse(name)


# ---------------------------------------------------------------- drafts over time

SAMPLES = st.builds(
    DraftSample,
    at=st.floats(10.0, 20.0),
    layout=st.sampled_from([ONE, TWO]),
    replica=st.integers(0, 1),
    num_speculative_tokens=st.integers(0, 7),
    steps=st.integers(1, 50),
    drafted=st.integers(50, 100),
    accepted=st.integers(0, 50),
)


@given(st.lists(SAMPLES), st.sampled_from([1.0, 2.0, 4.0]))
def test_drafts_over_time(samples: list[DraftSample], width: float) -> None:
    means = drafts_over_time(samples, 12.0, width)
    assert list(means) == sorted(means, key=lambda one: one.start)
    lengths = {one.num_speculative_tokens for one in samples}
    covered = 0
    for one in means:
        inside = [s for s in samples if one.start <= s.at - 12.0 < one.end]
        covered += len(inside)
        assert min(lengths) <= one.num_speculative_tokens <= max(lengths)
        assert one.end - one.start == pytest.approx(width)
        assert one.acceptance is not None
        assert one.acceptance == sum(s.accepted for s in inside) / sum(s.drafted for s in inside)
    assert covered == sum(one.at >= 12.0 for one in samples)


def test_intervals_without_drafts() -> None:
    samples = [DraftSample(3.5, ONE, 0, 4, 3, 12, 6), DraftSample(3.6, ONE, 1, 2, 1, 0, 0)]
    nothing = DraftSample(6.2, TWO, 0, 0, 9, 0, 0)
    first, last = drafts_over_time([*samples, nothing], 3.0)
    assert (first.num_speculative_tokens, first.acceptance) == (3.5, 0.5)
    assert (last.start, last.num_speculative_tokens, last.acceptance) == (3.0, 0.0, None)


# ---------------------------------------------------------------- the history


def test_history_keeps_changes_and_first_steps():
    report = history().report(TWO, [ONE, TWO])
    assert [(s.layout, s.num_seqs) for s in report.timeline] == [(ONE, 5), (ONE, 4)]
    assert report.switches[0].first_step == 0.5
    assert report.steps[TWO].steps == 3
    assert report.steps[TWO].median == 0.125
    assert report.steps[TWO].seconds == 0.75
    assert report.errors == 0


def test_each_switch_has_the_first_step_after_it():
    history = History()
    for at in (1.0, 2.0):
        history.switch(a_switch(at))
    history.step(TWO, 0.5)
    history.step(TWO, 0.25)
    assert [s.first_step for s in history.report(TWO, [TWO]).switches] == [None, 0.5]


def test_unexpected_errors_are_counted():
    """All of them, though only some records are kept, and whatever time is asked for."""
    history = History()
    history.refused(RefusedSwitch(1.0, ONE, TWO, "no room"))
    for at in range(MAX_RECORDS + 1):
        history.refused(RefusedSwitch(2.0 + at, ONE, TWO, "KeyError('r1')", expected=False))
    report = history.report(ONE, [ONE, TWO], since=1e9)
    assert report.refused == ()
    assert report.errors == MAX_RECORDS + 1


def a_long_history(monkeypatch: pytest.MonkeyPatch) -> History:
    """As full as it gets: a record of each kind every second, from 0 s on, and more than fit."""
    now = 0.0
    monkeypatch.setattr(history_module.time, "monotonic", lambda: now)
    history = History()
    for second in range(MAX_RECORDS + 10):
        now = float(second)
        history.live(ONE, second)
        history.switch(a_switch(now))
        history.refused(RefusedSwitch(now, TWO, ONE, "because"))
        history.step(ONE, 0.5)
    return history


def test_since(monkeypatch: pytest.MonkeyPatch):
    history = a_long_history(monkeypatch)
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
        assert report.steps[ONE].steps == MAX_RECORDS + 10  # totals stay whole
    assert history.report(ONE, [ONE, TWO], last + 1).layouts == (ONE, TWO)


def check_drafts_are_counted() -> None:
    """By replica, draft length and second; those of two batches apart."""
    history = History()
    for at, replica, length, drafted, accepted in (
        (10.0, 0, 4, 0, 0),
        (10.1, 1, 4, 8, 3),
        (10.2, 0, 4, 16, 7),
        (10.3, 0, 1, 4, 4),
        (11.2, 1, 4, 8, 2),
        (11.3, 1, 4, 8, 1),
    ):
        history.drafts(at, ONE, replica, length, drafted, accepted)
    history.idle()
    history.drafts(11.4, ONE, 1, 4, 8, 8)
    samples = [
        (one.at, one.replica, one.num_speculative_tokens, one.steps, one.drafted, one.accepted)
        for one in history.report(ONE, [ONE]).drafts
    ]
    assert samples == [
        (10.0, 0, 4, 2, 16, 7),
        (10.1, 1, 4, 1, 8, 3),
        (10.3, 0, 1, 1, 4, 4),
        (11.2, 1, 4, 2, 16, 3),
        (11.4, 1, 4, 1, 8, 8),
    ]
    assert [one.at for one in history.report(ONE, [ONE], since=11.3).drafts] == [11.4]


def test_drafts_are_counted():
    check_drafts_are_counted()


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        pytest.param(
            History.idle, {"self._counting.clear()": "pass"}, id="a batch's steps counted twice"
        ),
        pytest.param(
            History.drafts, {"self._counting.get(replica)": "None"}, id="each step by itself"
        ),
    ],
)
def test_drafts_that_are_counted_wrongly_are_seen(function: Any, changes: dict[str, str]):
    with mutated(function, changes), pytest.raises(AssertionError):
        check_drafts_are_counted()


def test_little_is_sent_of_a_long_history(monkeypatch: pytest.MonkeyPatch):
    history = a_long_history(monkeypatch)
    whole = history.report(ONE, [ONE, TWO]).to_json()
    recent = history.report(ONE, [ONE, TWO], since=MAX_RECORDS - 10.0).to_json()
    assert len(recent) < 20_000 < 2_000_000 < len(whole)


def test_decisions_since():
    decisions = Decisions()
    for at in range(MAX_DECISIONS + 5):
        decisions.add(a_decision(float(at)))
        decisions.stepped(TWO, 0.25)
    assert len(decisions.since()) == MAX_DECISIONS
    recent = decisions.since(MAX_DECISIONS + 2.5)
    assert [one.at for one in recent] == [MAX_DECISIONS + 3, MAX_DECISIONS + 4]
    assert [one.real_after for one in recent] == [0.25, None]


def test_what_follows_a_decision_completes_it():
    """However many were nearly made since, until it is not kept any more."""
    decisions = Decisions()
    decisions.add(a_decision(0.0))
    for at in range(1, MAX_DECISIONS):
        decisions.add(a_decision(float(at), fired=False, why="later"))
    decisions.switched(a_switch(1.0))
    fired, *others = decisions.since()
    assert fired.real_cost == pytest.approx(0.07)
    decisions.add(a_decision(1e4, fired=False, why="later"))
    decisions.switched(a_switch(1.0))
    assert decisions.since()[:-1] == tuple(others)


# ---------------------------------------------------------------- threads


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[threading.Thread]:
    """Run `work` in another thread, with which this one takes turns as often as can be."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=run)
    try:
        thread.start()
        yield thread
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed, failed


def test_a_history_is_read_while_it_grows():
    history = History()
    layouts = [Layout(1, 1 + replicas) for replicas in range(1_000)]
    read = threading.Event()

    def work() -> None:
        for index, layout in enumerate(layouts):
            if index == 500:
                read.wait()
            for _ in range(3):
                history.step(layout, 1.0)
            history.live(layout, index)
            history.switch(a_switch(float(index)))
            history.refused(RefusedSwitch(float(index), ONE, TWO, "because"))

    with beside(work) as worker:
        while worker.is_alive():
            report = history.report(ONE, [ONE], since=0.0)
            # Of each layout a sum and a count that belong together; of each record all.
            assert all(one.seconds == one.steps for one in report.steps.values())
            for records in (report.switches, report.refused):
                assert [one.at for one in records] == list(range(len(records)))
            read.set()
    assert sum(one.steps for one in history.report(ONE, [ONE]).steps.values()) == 3_000


def test_decisions_are_read_while_they_are_made():
    decisions = Decisions()

    def work() -> None:
        for at in range(3 * MAX_DECISIONS):
            decisions.add(a_decision(float(at)))
            decisions.stepped(TWO, 0.25)
            decisions.switched(a_switch(float(at)))

    with beside(work) as worker:
        while worker.is_alive():
            times = [one.at for one in decisions.since()]
            assert not times or times == [times[0] + i for i in range(len(times))]


# ---------------------------------------------------------------- the calls of users


class Engine:
    """Stands for an `LLM` or `AsyncLLM`, whose command gives the report as JSON."""

    def __init__(self) -> None:
        self.llm_engine = self
        self.engine_core = None

    def call(self, method: str, args: tuple[float]) -> list[str]:
        assert method == "pat_report"
        return [history().report(TWO, [ONE, TWO], *args).to_json()]


class SyncEngine(Engine):
    def collective_rpc(self, method: str, args: tuple[float]) -> list[str]:
        return self.call(method, args)


class AsyncEngine(Engine):
    async def collective_rpc(self, method: str, args: tuple[float]) -> list[str]:
        return self.call(method, args)


@pytest.mark.parametrize(
    "report",
    [
        lambda *since: pat_vllm.report(SyncEngine(), *since),
        lambda *since: asyncio.run(pat_vllm.report_async(AsyncEngine(), *since)),
    ],
)
def test_users_ask_since_a_time(report: Callable[..., Report]):
    before = time.monotonic()
    assert (len(report().switches), len(report().timeline)) == (1, 2)
    recent = report(before)
    assert (len(recent.switches), len(recent.refused), len(recent.timeline)) == (0, 0, 2)
    assert recent.steps[TWO].steps == 3


# ---------------------------------------------------------------- a rollout's line


def line(report):
    return asyncio.run(describe_awaited(report, 0.0, 2.5, 8))


def test_a_rollout_is_described_when_its_report_has_come():
    async def arrives():
        return history().report(TWO, [ONE, TWO])

    assert line(arrives()).startswith("8 responses in 2.50 s; tp1dp2 -> tp2dp1 at 1.00 s")


def test_a_rollout_does_without_a_report(monkeypatch):
    async def fails():
        raise RuntimeError("no engine")

    async def never_comes():
        await asyncio.Event().wait()

    monkeypatch.setattr(rollout, "REPORT_SECONDS", 0.01)
    for report, why in ((fails, "RuntimeError('no engine')"), (never_comes, "TimeoutError()")):
        assert line(report()) == f"8 responses in 2.50 s; no report of the engine: {why}"

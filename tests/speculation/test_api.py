"""`pat_vllm.speculate`, and what the report says of drafts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

import pat_vllm
from pat_vllm.reporting import Report
from tests.engines import Outcome, run
from tests.speculation.batch import assert_same, batch
from tests.speculation.steps import MOST, watched

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean")]

USUAL = 1
"""Draft length of the shared engine, by its `speculative_config`."""


def lengths_during(llm: Any, before_step: Any = lambda step: None) -> Counter[int]:
    """Draft lengths of the steps of a batch."""
    with watched() as watch:
        run(llm, batch(2, 24), before_step=before_step)
    return watch.lengths


def test_lengths_that_are_not_kept_ready(llm: Any) -> None:
    bad: Any
    for bad in (-1, 3, MOST + 1, "2", 2.0, [1]):
        with pytest.raises(ValueError, match=r"the engine keeps \[0, 1, 2, 4\] ready"):
            pat_vllm.speculate(llm, bad)
    assert set(lengths_during(llm)) == {USUAL}


def test_none_takes_a_request_back(llm: Any) -> None:
    def before_step(step: int) -> None:
        watch.k = {0: USUAL, 1: 2, 2: USUAL}[step % 3]
        pat_vllm.speculate(llm, {0: None, 1: 2, 2: None}[step % 3])

    with watched() as watch:
        run(llm, batch(2, 24), before_step=before_step)
    assert set(watch.lengths) == {USUAL, 2}


def test_a_length_holds_across_switches_until_the_engine_is_idle(llm: Any) -> None:
    def before_step(step: int) -> None:
        if step in (4, 8):
            assert pat_vllm.switch(llm, tp=2 if step == 4 else 1)

    pat_vllm.speculate(llm, 2)
    assert set(lengths_during(llm, before_step)) == {2}
    assert set(lengths_during(llm, before_step)) == {USUAL}


def test_a_length_asked_for_after_a_batch_holds_for_the_next(llm: Any) -> None:
    """vLLM makes no step after the last output: the engine has not seen that it is idle."""
    for k in (2, 0, MOST):
        pat_vllm.speculate(llm, k)
        assert set(lengths_during(llm)) == {k}
    assert set(lengths_during(llm)) == {USUAL}


def test_from_another_thread(llm: Any, static: dict[str, Outcome]) -> None:
    failed: list[BaseException] = []

    def ask(k: int | None) -> None:
        try:
            pat_vllm.speculate(llm, k)
        except BaseException as error:
            failed.append(error)

    def before_step(step: int) -> None:
        if step % 3 == 0:
            watch.k = (0, 1, 2, MOST)[step // 3 % 4]
            asking = threading.Thread(target=ask, args=(watch.k if step < 30 else 99,))
            asking.start()
            asking.join(30)
            assert not asking.is_alive()
            watch.k = None if failed else watch.k

    with watched() as watch:
        found = run(llm, batch(), before_step=before_step)
    assert_same(found, static)
    assert set(watch.lengths) == {0, 1, 2, MOST}
    assert {type(one) for one in failed} <= {ValueError}


def test_the_report_has_the_drafts_of_each_replica(llm: Any) -> None:
    start = time.monotonic()
    before = pat_vllm.report(llm).drafts

    def before_step(step: int) -> None:
        if step == 0:
            pat_vllm.speculate(llm, MOST)
        if step == 10:
            assert pat_vllm.switch(llm, tp=2)
        if step == 14:
            pat_vllm.speculate(llm, 0)

    with watched() as watch:
        run(llm, batch(), before_step=before_step)
    report = pat_vllm.report(llm)
    assert Report.from_json(report.to_json()) == report
    mine = [one for one in pat_vllm.report(llm, since=start).drafts if one.at >= start]
    assert {(one.layout.tp, one.replica) for one in mine} == {(1, 0), (1, 1), (2, 0)}
    steps: Counter[int] = Counter()
    for one in mine:
        steps[one.num_speculative_tokens] += one.steps
    assert steps == watch.lengths
    assert set(steps) == {0, MOST}
    last = mine[-1]
    assert (last.num_speculative_tokens, last.layout.tp) == (0, 2)
    assert all(0 <= one.accepted <= one.drafted for one in mine)
    assert sum(one.accepted for one in mine) > 10
    assert [one.at for one in report.drafts] == sorted(one.at for one in report.drafts)
    # What this batch began counts once, and what was before does not change.
    assert set(before) - set(report.drafts) <= {one for one in before if one.at > start - 1}

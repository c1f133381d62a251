"""`pat_vllm.speculate`, and what the report says of drafts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import pat_vllm
from pat_vllm.reporting import Report
from tests.engine.specs import DRAFTS
from tests.engine.speculation.batch import batch, without_drafts
from tests.engine.speculation.steps import watched
from tests.support.engines import run
from tests.support.same import assert_same
from tests.vllm.scheduler.protocol import LENGTHS, MOST

pytestmark = pytest.mark.engine(DRAFTS)

USUAL = 1
"""Draft length of this engine, by its `speculative_config`."""


def lengths_during(
    llm: Any, before_step: Callable[[int], None] = lambda step: None
) -> Counter[int]:
    """Draft lengths of the steps of a batch."""
    with watched() as watch:
        run(llm, batch(2, 24), before_step=before_step)
    return watch.lengths


def test_none_takes_a_request_back(llm: Any) -> None:
    def before_step(step: int) -> None:
        watch.k = {0: USUAL, 1: 2, 2: USUAL}[step % 3]
        pat_vllm.speculate(llm, {0: None, 1: 2, 2: None}[step % 3])

    with watched() as watch:
        run(llm, batch(2, 24), before_step=before_step)
    assert set(watch.lengths) == {USUAL, 2}


def test_a_length_holds_across_switches_until_the_engine_is_idle(llm: Any) -> None:
    """Also one that is asked for after a batch, which vLLM ends without a step of its own."""

    def before_step(step: int) -> None:
        if step in (4, 8):
            assert pat_vllm.switch(llm, tp=2 if step == 4 else 1)

    for k in (2, 0, MOST):
        pat_vllm.speculate(llm, k)
        assert set(lengths_during(llm, before_step)) == {k}
    assert set(lengths_during(llm, before_step)) == {USUAL}


def test_from_another_thread(llm: Any) -> None:
    """A length that is not kept ready is an error there, and changes nothing."""
    errors: list[BaseException] = []

    def ask(k: int | None) -> None:
        try:
            pat_vllm.speculate(llm, k)
        except BaseException as error:
            errors.append(error)

    def before_step(step: int) -> None:
        if step % 3 == 0:
            length = LENGTHS[step // 3 % 4] if step < 30 else 99
            asking = threading.Thread(target=ask, args=(length,))
            asking.start()
            asking.join(30)
            assert not asking.is_alive()
            watch.k = length if length in LENGTHS else watch.k

    with watched() as watch:
        outcomes = run(llm, batch(), before_step=before_step)
    assert_same(outcomes, without_drafts())
    assert set(watch.lengths) == set(LENGTHS)
    assert {type(error) for error in errors} == {ValueError}


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
    assert (mine[-1].num_speculative_tokens, mine[-1].layout.tp) == (0, 2)
    assert all(0 <= one.accepted <= one.drafted for one in mine)
    assert sum(one.accepted for one in mine) > 10
    assert [one.at for one in report.drafts] == sorted(one.at for one in report.drafts)
    # What this batch began counts once, and what was before does not change.
    assert set(before) - set(report.drafts) <= {one for one in before if one.at > start - 1}

"""What goes wrong while drafts are in flight stays bounded: they are verified, or dropped whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import DRAFTS
from tests.engine.speculation.batch import batch, without_drafts
from tests.engine.speculation.steps import acceptance, drafts_in_flight, held_drafts
from tests.support.engines import Outcome, run, scheduler_of
from tests.support.same import assert_same
from tests.vllm.scheduler.protocol import MOST

pytestmark = [pytest.mark.engine(DRAFTS), pytest.mark.usefixtures("in_step")]


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


@pytest.fixture
def in_step(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine step is a step of each replica, whichever is the faster, and drafts the most."""
    executor = core_of(llm).model_executor
    finished = functools.partial(executor.finished, wait_for_all=True)
    monkeypatch.setattr(executor, "finished", finished)
    pat_vllm.speculate(llm, MOST)


def run_batch(llm: Any, before_step: Callable[[int], None]) -> dict[str, Outcome]:
    with acceptance(llm, low=0.2):
        return run(llm, batch(), before_step=before_step)


@pytest.mark.parametrize("when", ["before they are verified", "while they are verified"])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_abort_between_draft_and_verification(
    llm: Any, when: str, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests; the others go on, and the blocks of the two come back."""
    aborted: list[str] = []

    def abort(drafts: dict[str, list[int]]) -> None:
        if not aborted and len(drafts) >= 2:
            aborted.extend([min(drafts), max(drafts)])
            llm.llm_engine.abort_request(aborted)
            left = {name.rpartition("-")[0] for name in scheduler_of(llm).monitor.requests}
            assert not left & set(aborted)

    if when == "while they are verified":
        monkeypatch.setattr(
            core_of(llm), "_process_aborts_queue", lambda: abort(drafts_in_flight(llm))
        )

    def before_step(step: int) -> None:
        if step == 0:
            assert pat_vllm.switch(llm, tp=tp)
        if when == "before they are verified":
            abort(held_drafts(llm))

    outcomes = run_batch(llm, before_step)
    assert scheduler_of(llm).get_request_counts() == (0, 0)
    assert scheduler_of(llm).get_kv_cache_usage() == 0
    assert len(aborted) == 2
    expected = without_drafts()
    assert_same(outcomes, {name: expected[name] for name in expected.keys() - set(aborted)})

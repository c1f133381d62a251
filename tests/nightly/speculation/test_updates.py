"""New weights while an engine with drafts works: as in stock vLLM without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import DRAFTS_OPTIONS, IN_PLACE, UPDATES, USUALLY_ONE
from tests.engine.speculation.batch import MODEL, batch
from tests.engine.speculation.steps import held_drafts, requests_of, switch, watched
from tests.engine.test_weight_updates import PLAIN, load_all, sleep_with_new_weights
from tests.support.engines import Job, Outcome, run
from tests.support.models import phrase
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same
from tests.support.stock import stock_answers
from tests.vllm.scheduler.protocol import MOST

pytestmark = pytest.mark.engine(
    EngineSpec("drafts in place", MODEL, 2, IN_PLACE, DRAFTS_OPTIONS | USUALLY_ONE | UPDATES)
)

OLD, NEW = MODEL, "qwen3_updated"
"""Of one shape; the new one does not repeat itself."""
CARRIED = {
    "r0": Job(
        phrase(OLD, 30), {"max_tokens": 40, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    )
}


@pytest.mark.parametrize("tp", [1, 2])
def test_an_update_with_drafts_in_flight(llm: Any, tp: int) -> None:
    """Drafts of the old weights are verified by the new ones; the KV stays."""
    at = 0

    def before_step(step: int) -> None:
        nonlocal at
        if step == 0:
            assert pat_vllm.switch(llm, tp=tp)
        if step > 5 and not at and held_drafts(llm):
            (request,) = requests_of(llm)
            at = request.num_output_tokens
            load_all(llm, NEW)
        elif at and step % 6 == 0:
            switch(llm, 3 - pat_vllm.report(llm).layout.tp)

    def updated_at(llm: Any, jobs: Mapping[str, Job]) -> dict[str, Outcome]:
        def update(step: int) -> None:
            if step == at:  # a step gives a token here
                load_all(llm, NEW)

        return run(llm, jobs, update)

    load_all(llm, OLD)
    pat_vllm.speculate(llm, MOST)
    with watched(MOST) as watch:
        outcomes = run(llm, CARRIED, before_step=before_step)
    load_all(llm, OLD)
    assert 0 < at < 36 and watch.drafts > 0
    updated_at.__qualname__ += f" {at}"
    assert_same(outcomes, stock_answers(OLD, CARRIED, how=updated_at, **PLAIN), PLAIN_TOLERANCE)


def test_an_update_between_sleep_and_waking_up(llm: Any) -> None:
    """It reaches every layout."""
    for model in (NEW, OLD):
        expected = stock_answers(model, batch(), **PLAIN)
        go_home(llm)
        assert pat_vllm.switch(llm, tp=2)
        sleep_with_new_weights(llm, model)
        for tp in (2, 1):
            pat_vllm.switch(llm, tp=tp)
            pat_vllm.speculate(llm, MOST)
            with watched(MOST):
                assert_same(run(llm, batch()), expected, PLAIN_TOLERANCE)

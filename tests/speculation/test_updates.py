"""New weights while an engine speculates: as in stock vLLM without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import pat_vllm
from tests.engines import Job, Outcome, engine, run
from tests.models import phrase, random_model
from tests.speculation.batch import MODEL, batch, leave_clean, speculating
from tests.speculation.steps import MOST, held_drafts, requests_of, switch, watched
from tests.test_switch import PLAIN_TOLERANCE
from tests.test_weight_updates import PLAIN

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean")]

OLD, NEW = MODEL, "qwen3_updated"
"""Of one shape; the new one does not repeat itself."""
CARRIED = {
    "r0": Job(
        phrase(OLD, 30), {"max_tokens": 40, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    )
}


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with speculating(2, pat={"weights": "inplace"}, **PLAIN) as llm:
        yield llm


def assert_close(found: dict[str, Outcome], expected: dict[str, Outcome]) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert one.token_ids == expected[name].token_ids, name
        assert one.logprobs == pytest.approx(expected[name].logprobs, abs=PLAIN_TOLERANCE), name


def load(llm: Any, model: str) -> None:
    llm.collective_rpc("load_all", args=(str(random_model(model)),))


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
            load(llm, NEW)
        elif at and step % 6 == 0:
            switch(llm, 3 - pat_vllm.report(llm).layout.tp)

    load(llm, OLD)
    with watched(MOST) as watch:
        found = run(llm, CARRIED, before_step=before_step)
    assert 0 < at < 36 and watch.drafts > 0

    def update(step: int) -> None:
        if step == at:  # one step gives one token here
            load(stock, NEW)

    with engine(OLD, 1, None, **PLAIN) as stock:
        assert_close(found, run(stock, CARRIED, before_step=update))


def test_an_update_between_sleep_and_waking_up(llm: Any) -> None:
    """It reaches every layout."""
    expected = {}
    for model in (NEW, OLD):
        with engine(model, 1, None, **PLAIN) as stock:
            expected[model] = run(stock, batch())
    for model in (NEW, OLD):
        leave_clean(llm)
        assert pat_vllm.switch(llm, tp=2)
        llm.sleep(level=2)
        llm.collective_rpc("lose_weights")
        llm.wake_up(["weights"])
        load(llm, model)
        llm.wake_up(["kv_cache"])
        for tp in (2, 1):
            pat_vllm.switch(llm, tp=tp)
            with watched(MOST):
                assert_close(run(llm, batch()), expected[model])

"""An engine whose new weights come in by parts: what happens meanwhile touches no layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams

import pat_vllm
from tests.engines import Outcome, engine, run
from tests.models import random_model
from tests.test_weight_updates import NEW, OLD, SIZES, assert_same, batch, load_all

pytestmark = pytest.mark.slow

EXTENSION = "tests.support.updates_by_layer.UpdatesByLayer"


@pytest.fixture(
    scope="module", params=["inplace", pytest.param("materialized", marks=pytest.mark.nightly)]
)
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    pat = {"kv_transfer": "migrate", "weights": request.param}
    with engine(OLD, 4, pat, worker_extension_cls=EXTENSION) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: Any) -> dict[str, Outcome]:
    """With the new weights, which have come all at once."""
    load_all(llm, NEW)
    found = run(llm, batch())
    load_all(llm, OLD)
    llm.reset_prefix_cache()
    assert run(llm, batch()) != found
    return found


def start(llm: Any, request_id: str) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    llm.llm_engine.add_request(request_id, {"prompt_token_ids": [5, 6, 7]}, params)


def test_what_happens_in_an_update(llm: Any, expected: dict[str, Outcome]) -> None:
    """Requests that are paused go away; others ask for layouts; the engine has nothing to do."""
    core = llm.llm_engine.engine_core.engine_core
    load_all(llm, OLD)
    start(llm, "goes")
    for _ in range(3):
        llm.llm_engine.step()
    assert pat_vllm.switch(llm, tp=2)
    llm.llm_engine.step()
    core.pause_scheduler("keep", clear_cache=False)
    llm.collective_rpc("begin_update")
    for half in range(2):
        assert not pat_vllm.switch(llm, tp=4)
        refused = pat_vllm.report(llm).refused[-1]
        assert "finish_weight_update" in refused.why and refused.expected
        if half == 1:
            llm.llm_engine.abort_request(["goes"], internal=False)
        llm.llm_engine.step()
        assert pat_vllm.report(llm).layout.tp == 2
        llm.collective_rpc("load_half", args=(str(random_model(NEW)), half))
    llm.collective_rpc("end_update")
    core.resume_scheduler()
    llm.reset_prefix_cache()
    for tp in (2, *SIZES):

        def before_step(step: int, tp: int = tp) -> None:
            if step == 0:
                assert pat_vllm.switch(llm, tp=tp)

        assert_same(run(llm, batch(), before_step=before_step), expected)

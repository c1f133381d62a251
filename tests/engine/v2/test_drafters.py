"""Drafters with weights, with Model Runner V2: beside earlier responses, of linear attention.

What holds with each of vLLM's model runners is shown on V1 (`tests/engine/test_drafters.py`), and
on V2 nightly.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import MTP_LINEAR, V2_MTP
from tests.engine.test_drafters import (
    GREEDY,
    batch,
    load_into,
    take_tour,
    verified,
    without_drafts,
)
from tests.support.engines import Job, Outcome, run
from tests.support.models import random_model
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same

pytestmark = pytest.mark.engine(V2_MTP, MTP_LINEAR)

ENGINES = {
    "test_trainers_update_the_drafter_by_its_name_on_v1": [V2_MTP],
    "test_earlier_responses_draft_where_more_of_them_is_accepted": [V2_MTP],
    "test_linear_attention_goes_on_from_the_last_accepted_token": [MTP_LINEAR],
}


def test_trainers_update_the_drafter_by_its_name_on_v1(llm: Any) -> None:
    new = "mimo_updated"
    try:
        for drafter in (False, True):
            llm.collective_rpc(load_into, args=(str(random_model(new)), drafter))
        go_home(llm)
        with verified() as seen:
            outcomes = run(llm, batch("mimo"))
            drafted, accepted = seen.take()
        assert_same(outcomes, without_drafts(new, batch("mimo")), PLAIN_TOLERANCE)
        assert not pat_vllm.report(llm).drafter_is_stale
        assert 0 < accepted < drafted
    finally:
        for drafter in (False, True):
            llm.collective_rpc(load_into, args=(str(random_model("mimo")), drafter))


def test_earlier_responses_draft_where_more_of_them_is_accepted(llm: Any) -> None:
    """Of prompts that come again. It is so across switches, and with the same text."""
    shares = []
    for _ in range(2):
        with verified() as seen:
            outcomes = take_tour(llm, "mimo", seed=5)
            drafted, accepted = seen.take()
        assert_same(outcomes, without_drafts("mimo", seed=5), PLAIN_TOLERANCE)
        shares.append(accepted / drafted)
    assert shares[1] > shares[0] + 0.1, shares


def test_linear_attention_goes_on_from_the_last_accepted_token(llm: Any, spec: EngineSpec) -> None:
    """Switches at every second step: as requests come from one block of 64 tokens into the next,
    where a step verifies no drafts, and beside a request that is given up. A prompt is found in the
    cache, if there is one."""
    rng = random.Random(5)
    few = GREEDY | {"max_tokens": 40}
    lengths = (150, 33, 60, 97, 52, 56, 115)
    jobs = {f"r{n}": Job([rng.randrange(3, 400) for _ in range(n)], few) for n in lengths}
    jobs["late"] = Job([*jobs["r150"].prompt, 7, 8], few, arrives=45)
    given_up = Job([5] * 50, GREEDY | {"max_tokens": 100})
    drafts = {0: 2, 20: 0, 26: 2, 36: 1}
    before_switches: list[tuple[int, int]] = []
    seen: dict[str, Outcome] = {}

    def before_step(step: int) -> None:
        if step in drafts:
            pat_vllm.speculate(llm, drafts[step])
        if step == 17:
            llm.llm_engine.abort_request(["given up"])
        if step % 2:
            counts.take()
        elif step:
            before_switches.append(counts.take())
            assert pat_vllm.switch(llm, tp=1 + step // 2 % 2)

    go_home(llm)
    with verified() as counts:
        outcomes = run(llm, jobs | {"given up": given_up}, before_step, seen)
    outcomes.pop("given up", None)
    assert_same(outcomes, without_drafts(spec.model, jobs), PLAIN_TOLERANCE)
    cached = outcomes["late"].num_cached_tokens
    assert bool(cached) == spec.options.get("enable_prefix_caching", True)
    drafted, accepted = map(sum, zip(*before_switches, strict=True))
    assert 10 < accepted < drafted, before_switches
    assert sum(switch.migrated for switch in pat_vllm.report(llm).switches) > 20

"""Switches inside runs of accepted drafts on further engines: four ranks, mixtures, windows."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import (
    CUT,
    DRAFTS,
    DRAFTS_OPTIONS,
    IN_PLACE,
    MIGRATE,
    SPREAD,
    USUALLY_ONE,
)
from tests.engine.speculation.batch import (
    MODEL,
    batch,
    check_storm,
    copies_of,
    take_way,
    without_drafts,
)
from tests.engine.speculation.steps import acceptance, watched
from tests.engine.test_switch import tolerance
from tests.engine.v2.batch import kv_carried, sizes_of, tour
from tests.support.engines import Outcome, run, teacher_forced
from tests.support.pool import EnginePool, EngineSpec, go_home
from tests.support.same import assert_same, of_batch
from tests.vllm.scheduler.protocol import LENGTHS

OPTIONS: dict[str, Any] = DRAFTS_OPTIONS | USUALLY_ONE
FOUR = EngineSpec("four, copies", MODEL, 4, MIGRATE | {"weights": "materialized"}, OPTIONS)
FOUR_IN_PLACE = EngineSpec("four, in place", MODEL, 4, IN_PLACE, OPTIONS)
# Experts cut, and spread, with shared ones, which are cut.
EXPERTS = EngineSpec("experts", "repeating_moe", 2, IN_PLACE | CUT, OPTIONS)
SHARED_EXPERTS = EngineSpec("shared experts", "repeating_shared", 4, IN_PLACE | SPREAD, OPTIONS)
# Drafts that reach over a window's edge, and are refused there.
WINDOWS = EngineSpec("windows", "repeating_mistral", 2, MIGRATE, OPTIONS)
LATENT = EngineSpec("latent", "repeating_deepseek", 2, IN_PLACE, OPTIONS)
GPT_OSS = EngineSpec("gpt-oss", "repeating_gpt_oss", 2, IN_PLACE, OPTIONS)

pytestmark = pytest.mark.engine(
    *(FOUR, FOUR_IN_PLACE, EXPERTS, SHARED_EXPERTS, WINDOWS, LATENT, GPT_OSS)
)
ENGINES = {
    "test_single_layouts": [FOUR, FOUR_IN_PLACE, WINDOWS, LATENT, GPT_OSS],
    "test_log_probabilities_are_those_of_the_target_layout": [
        FOUR,
        FOUR_IN_PLACE,
        WINDOWS,
        LATENT,
        GPT_OSS,
    ],
    "test_long_storm": [DRAFTS],
}


@pytest.fixture
def static(llm: Any, spec: EngineSpec, engines: EnginePool) -> dict[str, Outcome]:
    """What the batch gives in the base layout without drafts: what stock vLLM does."""

    def generate() -> dict[str, Outcome]:
        pat_vllm.speculate(llm, 0)
        outcomes = run(llm, batch())
        if spec.model == MODEL:
            assert_same(outcomes, without_drafts(), tolerance(llm))
        go_home(llm)
        return outcomes

    return engines.keep("static", generate)


@pytest.mark.parametrize("k", LENGTHS)
def test_single_layouts(llm: Any, static: dict[str, Outcome], k: int) -> None:
    for tp in sizes_of(llm):
        go_home(llm)
        assert pat_vllm.switch(llm, tp=tp)
        pat_vllm.speculate(llm, k)
        with watched(k) as watch:
            if k:
                with acceptance(llm):
                    outcomes = run(llm, batch())
            else:
                outcomes = run(llm, batch())
        assert_same(outcomes, static, tolerance(llm))
        assert set(watch.lengths) == {k}


def test_log_probabilities_are_those_of_the_target_layout(
    llm: Any, static: dict[str, Outcome]
) -> None:
    """For every ordered pair, without drafts there."""
    texts = {name: (job.prompt, static[name].token_ids) for name, job in batch().items()}
    scores = {}
    for tp in sizes_of(llm):
        assert pat_vllm.switch(llm, tp=tp)
        scores[tp] = teacher_forced(llm, texts)
    for seed, pair in enumerate(itertools.permutations(scores, 2)):
        began = len(pat_vllm.report(llm).switches)
        outcomes, _ = take_way(llm, pair, batch(), static, tolerance(llm), seed)
        (switch,) = [switch for switch in pat_vllm.report(llm).switches[began:] if switch.num_seqs]
        assert (switch.source.tp, switch.target.tp) == pair
        assert switch.migrated == switch.num_seqs > 3
        for name, outcome in outcomes.items():
            expected = pytest.approx(scores[pair[1]][name], abs=tolerance(llm))
            assert outcome.logprobs == expected, (pair, name)


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_tour_of_all_layouts(llm: Any, static: dict[str, Outcome], in_flight: bool) -> None:
    """With another draft length before each step; some KV is left behind where some is verified."""
    way = tour(sizes_of(llm))
    # So many requests that they last to its end.
    arrivals = [lambda copy=copy: 20 * copy for copy in range(1 + len(way) // 4)]
    jobs = copies_of(batch(), arrivals)
    expected = {name: static[of_batch(name)] for name in jobs}
    rng = random.Random(1)
    ways = ("migrate", "recompute") if in_flight else ("migrate",)
    with kv_carried(llm, lambda: rng.choice(ways)):
        take_way(llm, way, jobs, expected, tolerance(llm), in_flight=in_flight)


def test_storm(llm: Any, static: dict[str, Outcome]) -> None:
    check_storm(llm, static, copies=2)


def test_long_storm(llm: Any) -> None:
    check_storm(llm, without_drafts(), copies=12)

"""Every ordered pair of layouts, with switches inside runs of accepted drafts.

What is generated must be what stock vLLM generates without speculation, log-probabilities included.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

import pat_vllm
from tests.engines import Outcome, run, scheduler_of, teacher_forced
from tests.speculation.batch import (
    assert_same,
    batch,
    leave_clean,
    sizes_of,
    speculating,
    take_way,
)
from tests.speculation.steps import LENGTHS, MOST, acceptance, watched
from tests.test_switch import PLAIN_TOLERANCE, TOLERANCE
from tests.v2.batch import tour

# Four ranks verify drafts slowly on two cores. The storm has both pairs of two ranks.
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.usefixtures("clean")]


@pytest.fixture(
    scope="module",
    params=["materialized", pytest.param("inplace", marks=pytest.mark.nightly)],
)
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine of four ranks."""
    with speculating(4, pat={"weights": request.param}) as llm:
        yield llm


def tolerance(llm: Any) -> float:
    pat = llm.llm_engine.vllm_config.additional_config["pat"]
    return PLAIN_TOLERANCE if pat["weights"] == "inplace" else TOLERANCE


@pytest.mark.parametrize(
    "k", [pytest.param(k, marks=[pytest.mark.nightly] if 0 < k < MOST else []) for k in LENGTHS]
)
def test_single_layouts(llm: Any, static: dict[str, Outcome], k: int) -> None:
    for tp in sizes_of(llm):
        leave_clean(llm)
        assert pat_vllm.switch(llm, tp=tp)
        pat_vllm.speculate(llm, k)
        with watched(k) as watch:
            if k:
                with acceptance(llm):
                    found = run(llm, batch())
            else:
                found = run(llm, batch())
        assert_same(found, static, tolerance(llm))
        assert set(watch.lengths) == {k}


@pytest.fixture(scope="module")
def forced(llm: Any, static: dict[str, Outcome]) -> dict[int, Any]:
    """The log-probabilities that each layout, without drafts, gives to the tokens."""
    texts = {name: (job.prompt, static[name].token_ids) for name, job in batch().items()}
    scores = {}
    for tp in sizes_of(llm):
        assert pat_vllm.switch(llm, tp=tp)
        scores[tp] = teacher_forced(llm, texts)
    return scores


def test_every_ordered_pair_of_layouts(
    llm: Any, static: dict[str, Outcome], forced: dict[int, Any]
) -> None:
    """The draft length changes before each step."""
    sizes = sizes_of(llm)
    assert sizes == [1, 2, 4]
    for pair in itertools.permutations(sizes, 2):
        before = len(pat_vllm.report(llm).switches)
        found, _ = take_way(llm, pair, batch(), static, tolerance(llm), seed=sum(pair))
        (made,) = [one for one in pat_vllm.report(llm).switches[before:] if one.num_seqs]
        assert (made.source.tp, made.target.tp) == pair
        assert made.migrated == made.num_seqs > 3
        for name, outcome in found.items():
            scores = forced[made.target.tp][name]
            assert outcome.logprobs == pytest.approx(scores, abs=tolerance(llm)), (pair, name)


def test_a_tour_with_verification_in_flight(llm: Any, static: dict[str, Outcome]) -> None:
    """And with KV that is left behind, for some of the requests."""
    rng = random.Random(1)
    costs = scheduler_of(llm).controller.costs
    way = tour(sizes_of(llm))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "choose", lambda *request: rng.choice(("migrate", "recompute")))
        _, walk = take_way(llm, way, batch(), static, tolerance(llm), in_flight=True)
    assert walk.verified > 4

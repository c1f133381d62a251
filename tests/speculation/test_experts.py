"""Drafts of mixtures of experts: cut in one layout of each width, spread in the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import pat_vllm
from tests.engines import Job, Outcome, run, scheduler_of
from tests.speculation.batch import assert_same, batch, speculating, take_way
from tests.speculation.steps import LENGTHS, acceptance, watched
from tests.v2.batch import tour

pytestmark = [pytest.mark.slow]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("repeating_moe", 2), id="2 ranks"),
        pytest.param(("repeating_shared", 4), id="shared, 4 ranks", marks=pytest.mark.nightly),
    ],
)
def llm(request: pytest.FixtureRequest) -> Iterator[Any]:
    model, ranks = request.param
    # Its metrics would take the place of the package's engine's in this process.
    inplace: Any = {"pat": {"weights": "inplace"}, "disable_log_stats": True}
    with speculating(ranks, model=model, **inplace) as llm:
        yield llm


@pytest.fixture(scope="module")
def static(llm: Any) -> dict[str, Outcome]:
    """What the batch gives in the base layout without drafts."""
    assert pat_vllm.switch(llm, tp=names(llm)[0])
    pat_vllm.speculate(llm, 0)
    return run(llm, batch())


def names(llm: Any) -> list[str]:
    return [str(layout) for layout in pat_vllm.report(llm).layouts]


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_tour_of_all_layouts(llm: Any, static: dict[str, Outcome], in_flight: bool) -> None:
    """Between every two of them, with another draft length before each step."""
    assert {name[3:] for name in names(llm)} >= {"dp1", "dp1ep"}
    way = tour(names(llm))
    copies = 1 + len(way) // 4  # of the requests, so that they last to its end
    jobs = {
        f"{name}/{copy}": Job(job.prompt, job.sampling, arrives=20 * copy)
        for name, job in batch().items()
        for copy in range(copies)
    }
    expected = {name: static[name.split("/")[0]] for name in jobs}
    take_way(llm, way, jobs, expected, in_flight=in_flight)


def test_storm(llm: Any, static: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """Random switches and draft lengths while requests arrive and are given up."""
    rng = random.Random(7)
    layouts = names(llm)
    jobs = {
        f"{name}/{copy}": Job(job.prompt, job.sampling, arrives=copy * rng.randint(0, 30))
        for name, job in batch().items()
        for copy in range(2)
    }
    doomed = {
        f"doomed{i}": Job([5 + i, 9, 7] * 12, {"max_tokens": 300, "ignore_eos": True}, 6 * i)
        for i in range(6)
    }
    ways = ("migrate", "migrate", "recompute")
    costs = scheduler_of(llm).controller.costs
    monkeypatch.setattr(costs, "choose", lambda *request: rng.choice(ways))

    def before_step(step: int) -> None:
        for name, job in doomed.items():
            if step == job.arrives + 7:
                llm.llm_engine.abort_request([name])
        if step % 2:
            assert pat_vllm.switch(llm, tp=rng.choice(layouts))
        watch.k = rng.choice(LENGTHS)
        pat_vllm.speculate(llm, watch.k)

    before = len(pat_vllm.report(llm).switches)
    with watched() as watch, acceptance(llm):
        found = run(llm, jobs | doomed, before_step=before_step)

    done = {name: one for name, one in found.items() if name in jobs}
    assert_same(done, {name: static[name.split("/")[0]] for name in jobs})
    made = [one for one in pat_vllm.report(llm).switches[before:] if one.num_seqs]
    assert {str(one.target) for one in made} == {*layouts}
    assert sum(one.migrated for one in made) > 10
    assert sum(one.recomputed for one in made) > 5

"""Random switches and draft lengths under requests that come, go and are given up."""

from __future__ import annotations

import random
from typing import Any

import pytest

import pat_vllm
from tests.engines import Job, Outcome, run, scheduler_of
from tests.speculation.batch import assert_same, batch, start_step
from tests.speculation.steps import LENGTHS, acceptance, requests_of, switch, watched

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean")]


@pytest.mark.parametrize("copies", [2, pytest.param(12, marks=pytest.mark.nightly)])
def test_storm(copies: int, llm: Any, static: dict[str, Outcome]) -> None:
    rng = random.Random(copies)
    costs = scheduler_of(llm).controller.costs
    jobs = {
        f"{name}/{copy}": Job(job.prompt, job.sampling, arrives=copy * rng.randint(0, 40))
        for name, job in batch().items()
        for copy in range(copies)
    }
    doomed = {
        f"doomed{i}": Job([5 + i, 9, 7] * 12, {"max_tokens": 300, "ignore_eos": True}, 6 * i)
        for i in range(3 * copies)
    }
    dropped = verified = 0

    def before_step(step: int) -> None:
        nonlocal dropped, verified
        for name, job in doomed.items():
            if step == job.arrives + 7:
                llm.llm_engine.abort_request([name])
        if step % 2 and step > 2:
            before = {one.request_id: one.num_output_tokens for one in requests_of(llm)}
            if rng.random() < 0.4:
                start_step(llm)
            if step % 3 == 0:  # a request is given up while its drafts are verified
                for name in [name for name, job in doomed.items() if step > job.arrives][-1:]:
                    llm.llm_engine.abort_request([name])
            dropped += len(switch(llm, rng.choice((1, 2))))
            for one in requests_of(llm):
                verified += one.num_output_tokens > before[one.request_id] + 1
        watch.k = rng.choice(LENGTHS)
        pat_vllm.speculate(llm, watch.k)

    before = len(pat_vllm.report(llm).switches)
    with pytest.MonkeyPatch.context() as patch, watched() as watch, acceptance(llm):
        ways = ("migrate", "migrate", "recompute")
        patch.setattr(costs, "choose", lambda *request: rng.choice(ways))
        found = run(llm, jobs | doomed, before_step=before_step)

    done = {name: one for name, one in found.items() if name in jobs}
    assert_same(done, {name: static[name.split("/")[0]] for name in jobs})
    made = [one for one in pat_vllm.report(llm).switches[before:] if one.num_seqs]
    assert len(made) >= 6 * copies
    assert sum(one.migrated for one in made) > 10 * copies
    assert sum(one.recomputed for one in made) > 5 * copies
    assert dropped > 4 * copies
    assert verified
    assert set(watch.lengths) == set(LENGTHS)

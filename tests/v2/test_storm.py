"""Random switches under streams that come, go and are given up: no token is lost or doubled."""

from __future__ import annotations

import random
from typing import Any

import pytest

import pat_vllm
from tests.engines import Job, Outcome, run, scheduler_of
from tests.v2.batch import Served, assert_same, assert_teacher_forced

pytestmark = pytest.mark.slow


def of_batch(name: str) -> str:
    """The job of the batch of which another is a copy."""
    return name.split("/")[0]


class Storm:
    """Before each step: switches whenever a few tokens have come, and gives requests up.

    Attributes:
        seen: what has come so far.
        given_up: requests, each with the number of tokens after which it is aborted.
    """

    def __init__(self, llm: Any, rng: random.Random, given_up: dict[str, int]) -> None:
        self.seen: dict[str, Outcome] = {}
        self.given_up = given_up
        self._llm = llm
        self._rng = rng
        self._due = 0
        self._sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]

    def __call__(self, step: int) -> None:
        for name, tokens in list(self.given_up.items()):
            if name in self.seen and len(self.seen[name].token_ids) >= tokens:
                del self.given_up[name]
                self._llm.llm_engine.abort_request([name])
        if sum(len(one.token_ids) for one in self.seen.values()) >= self._due:
            self._due += self._rng.randint(3, 16)
            assert pat_vllm.switch(self._llm, tp=self._rng.choice(self._sizes))


@pytest.mark.parametrize("copies", [2, pytest.param(16, marks=pytest.mark.nightly)])
def test_storm(copies: int, served: Served, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(copies)
    ways = ("migrate", "migrate", "recompute")
    costs = scheduler_of(llm).controller.costs
    monkeypatch.setattr(costs, "choose", lambda *request: rng.choice(ways))
    delta = {"output_kind": RequestOutputKind.DELTA}
    jobs = {
        f"{name}/{copy}": Job(job.prompt, job.sampling | delta, arrives=rng.randint(0, 40 * copies))
        for name, job in served.jobs.items()
        for copy in range(copies)
    }
    whole = sorted(name for name in jobs if served.static[of_batch(name)].finish_reason == "length")
    given_up = {name: rng.randint(1, 8) for name in rng.sample(whole, 2 * copies)}
    expected = {name: served.static[of_batch(name)] for name in jobs}
    storm = Storm(llm, rng, dict(given_up))
    before = len(pat_vllm.report(llm).switches)
    finished = run(llm, jobs, storm, storm.seen)

    assert not storm.given_up
    for name in given_up:
        tokens = storm.seen[name].token_ids
        assert len(tokens) >= given_up[name]
        if "unseeded" not in name:
            assert tokens == expected[name].token_ids[: len(tokens)], name
    done = {name: one for name, one in finished.items() if name not in given_up}
    assert_same(done, {name: expected[name] for name in jobs.keys() - given_up})
    made = [one for one in pat_vllm.report(llm).switches[before:] if one.num_seqs]
    assert len(made) >= 6 * copies
    assert sum(one.migrated for one in made) > 10 * copies
    assert sum(one.recomputed for one in made) > 5 * copies
    assert_teacher_forced(llm, jobs, done)

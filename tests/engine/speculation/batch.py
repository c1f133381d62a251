"""Requests of a model that repeats itself, ways through the layouts, and what must be equal."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import DRAFTS_OPTIONS
from tests.engine.speculation.steps import (
    Watch,
    acceptance,
    name_of,
    requests_of,
    start_step,
    switch,
    watched,
)
from tests.support.engines import Job, Outcome, run, scheduler_of
from tests.support.models import phrase
from tests.support.pool import go_home
from tests.support.same import TOLERANCE, assert_same, of_batch
from tests.support.stock import stock_answers
from tests.vllm.scheduler.protocol import LENGTHS

MODEL = "repeating"


def batch(requests: int = 6, longest: int = 72) -> dict[str, Job]:
    """Greedy requests, half of whose prompts are text of the model's own kind."""
    rng = random.Random(3)
    jobs = {}
    for i in range(requests):
        length = rng.randint(6, 120)
        prompt = [rng.randrange(3, 400) for _ in range(length)]
        if i % 2:
            prompt[-40:] = phrase(MODEL, min(length, 40), start=i)
        greedy = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        jobs[f"r{i}"] = Job(prompt, greedy | {"max_tokens": rng.randint(longest // 2, longest)})
    return jobs


def without_drafts(jobs: Mapping[str, Job] | None = None) -> dict[str, Outcome]:
    """What stock vLLM gives for jobs, or for the batch, without speculation."""
    # Its metrics would take the place of the other engine's in this process.
    options = DRAFTS_OPTIONS | {"disable_log_stats": True}
    return stock_answers(MODEL, batch() if jobs is None else jobs, **options)


def copies_of(jobs: Mapping[str, Job], arrivals: Sequence[Any]) -> dict[str, Job]:
    """Copies of jobs, one for each of `arrivals`: functions that give a job's step."""
    return {
        f"{name}/{copy}": Job(job.prompt, job.sampling, arrives=arrive())
        for name, job in jobs.items()
        for copy, arrive in enumerate(arrivals)
    }


class Walk:
    """Before each step: another draft length; and the next layout, inside a run of right drafts.

    Attributes:
        left: layouts where it has not been yet.
        dropped: draft tokens in flight at the switches.
        verified: drafts that were accepted by steps in flight at the switches.
    """

    def __init__(
        self,
        llm: Any,
        way: Sequence[int],
        expected: Mapping[str, Outcome],
        watch: Watch,
        rng: random.Random,
        in_flight: bool,
    ) -> None:
        """With `in_flight`, drafts are being verified when a switch comes."""
        self.left = list(way)
        self.dropped = self.verified = 0
        self._llm = llm
        self._expected = expected
        self._watch = watch
        self._rng = rng
        self._in_flight = in_flight
        self._due = 0
        self._tokens: dict[str, int] = {}

    def __call__(self, step: int) -> None:
        if step == 0:
            assert pat_vllm.switch(self._llm, tp=self.left.pop(0))
        elif self._inside_a_run() and self.left and step >= self._due:
            self._due = step + self._rng.randint(1, 3)
            before = {
                name_of(request): request.num_output_tokens for request in requests_of(self._llm)
            }
            if self._in_flight:
                start_step(self._llm)
            dropped = switch(self._llm, tp=self.left.pop(0))
            assert dropped or self._in_flight
            self.dropped += sum(map(len, dropped.values()))
            for request in requests_of(self._llm):
                self.verified += max(0, request.num_output_tokens - before[name_of(request)] - 1)
        self._watch.k = self._rng.choice(LENGTHS)
        pat_vllm.speculate(self._llm, self._watch.k)

    def _inside_a_run(self) -> bool:
        """Whether a request has just accepted drafts and holds others that are right."""
        inside = False
        for request in requests_of(self._llm):
            name, tokens = name_of(request), request.num_output_tokens
            gained, self._tokens[name] = tokens - self._tokens.get(name, 0), tokens
            drafts = list(request.spec_token_ids)
            right = self._expected[name].token_ids[tokens : tokens + len(drafts)]
            inside |= gained > 1 and bool(drafts) and drafts == right
        return inside


def take_way(
    llm: Any,
    way: Sequence[int],
    jobs: Mapping[str, Job],
    expected: Mapping[str, Outcome],
    tolerance: float = TOLERANCE,
    seed: int = 0,
    in_flight: bool = False,
) -> tuple[dict[str, Outcome], Walk]:
    """Run jobs through layouts; the outcomes are as expected. See `Walk`."""
    assert llm.reset_prefix_cache()
    with watched() as watch, acceptance(llm):
        walk = Walk(llm, way, expected, watch, random.Random(seed), in_flight)
        outcomes = run(llm, jobs, before_step=walk)
    assert not walk.left, "the requests ended before the way"
    assert walk.verified if in_flight else walk.dropped
    assert watch.drafts > 10
    assert_same(outcomes, expected, tolerance)
    return outcomes, walk


def check_storm(llm: Any, static: Mapping[str, Outcome], copies: int) -> None:
    """Random switches and draft lengths under requests that come, go and are given up.

    How many steps a request takes is up to the machine, as replicas do not wait for each other. So
    the storm is repeated until enough has happened.

    Args:
        static: what `batch()` gives without drafts.
        copies: of each request.
    """
    rng = random.Random(copies)
    layouts = {layout.tp for layout in pat_vllm.report(llm).layouts}
    least = {"switches": 6, "migrated": 10, "recomputed": 5, "dropped": 4, "verified": 1}
    counts: Counter[str] = Counter()
    targets: set[int] = set()
    lengths: set[int] = set()
    for _ in range(5):
        go_home(llm)
        storm = _Storm(llm, rng, copies)
        outcomes = storm.run()
        done = {name: outcome for name, outcome in outcomes.items() if name in storm.jobs}
        assert_same(done, {name: static[of_batch(name)] for name in storm.jobs})
        counts += storm.counts
        targets |= storm.targets
        lengths |= set(storm.lengths)
        enough = all(counts[name] >= count * copies for name, count in least.items())
        if enough and targets == layouts and lengths == set(LENGTHS):
            return
    raise AssertionError(f"too little happened: {counts}, {targets}, {lengths}")


class _Storm:
    """One batch in a storm.

    Attributes:
        jobs: the requests that are not given up.
        counts: switches, requests that they carried, drafts that they dropped, verified drafts.
        targets: layouts that were entered with requests.
        lengths: draft lengths of the steps.
    """

    def __init__(self, llm: Any, rng: random.Random, copies: int) -> None:
        self.counts: Counter[str] = Counter()
        self.targets: set[int] = set()
        self.lengths: set[int] = set()
        arrivals = [lambda copy=copy: copy * rng.randint(0, 40) for copy in range(copies)]
        self.jobs = copies_of(batch(), arrivals)
        self._llm = llm
        self._rng = rng
        self._layouts = [layout.tp for layout in pat_vllm.report(llm).layouts]
        self._doomed = {
            f"doomed{i}": Job([5 + i, 9, 7] * 12, {"max_tokens": 300, "ignore_eos": True}, 6 * i)
            for i in range(3 * copies)
        }

    def run(self) -> dict[str, Outcome]:
        """Outcomes by request."""
        llm, rng = self._llm, self._rng
        count = len(pat_vllm.report(llm).switches)
        with pytest.MonkeyPatch.context() as patch, watched() as watch, acceptance(llm):
            ways = ("migrate", "migrate", "recompute")
            costs = scheduler_of(llm).controller.costs
            patch.setattr(costs, "choose", lambda *request: rng.choice(ways))

            def before_step(step: int) -> None:
                self._give_up_and_switch(step)
                watch.k = rng.choice(LENGTHS)
                pat_vllm.speculate(llm, watch.k)

            outcomes = run(llm, self.jobs | self._doomed, before_step=before_step)
        switches = [switch for switch in pat_vllm.report(llm).switches[count:] if switch.num_seqs]
        self.targets = {switch.target.tp for switch in switches}
        self.lengths = set(watch.lengths)
        self.counts["switches"] = len(switches)
        self.counts["migrated"] = sum(switch.migrated for switch in switches)
        self.counts["recomputed"] = sum(switch.recomputed for switch in switches)
        return outcomes

    def _give_up_and_switch(self, step: int) -> None:
        llm, rng, doomed = self._llm, self._rng, self._doomed
        for name, job in doomed.items():
            if step == job.arrives + 7:
                llm.llm_engine.abort_request([name])
        if step % 2 and step > 2:
            before = {request.request_id: request.num_output_tokens for request in requests_of(llm)}
            if rng.random() < 0.4:
                start_step(llm)
            if step % 3 == 0:  # a request is given up while its drafts are verified
                for name in [name for name, job in doomed.items() if step > job.arrives][-1:]:
                    llm.llm_engine.abort_request([name])
            self.counts["dropped"] += len(switch(llm, rng.choice(self._layouts)))
            for request in requests_of(llm):
                gained = request.num_output_tokens - before[request.request_id]
                self.counts["verified"] += gained > 1

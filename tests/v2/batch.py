"""Requests for engines with Model Runner V2, ways through the layouts, and what must be equal."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import pytest

import pat_vllm
from tests.engines import Job, Outcome, run, scheduler_of, teacher_forced
from tests.test_switch import PLAIN_TOLERANCE
from tests.v2.in_workers import idle_requests

T = TypeVar("T", int, str)
CHUNK = 48
"""Tokens of a step, one and a half blocks: a longer prompt takes several steps."""
STOP = 77
MIN_TOKENS = 10
REGEX = "(ab|cd){3}-[0-9]{8}"
PLACES = 10
"""Requests that run at once in a replica."""
UNSEEDED = {"unseeded", "unseeded again"}
FEW = {"long", "penalties", "min_p", "unseeded", "greedy"}
"""Of the batch, what shows most, where all of it would take long."""


@dataclass(frozen=True)
class Served:
    """An engine and what it runs.

    Attributes:
        workers: its worker processes.
        jobs: the batch.
        static: what the batch gives in the home layout.
    """

    llm: Any
    workers: list[psutil.Process]
    jobs: dict[str, Job]
    static: dict[str, Outcome]


def batch(stop: str) -> dict[str, Job]:
    """Requests that each use something else. The interpreter cannot run the kernel for top-k.

    Args:
        stop: what "stop string" ends with.
    """
    from vllm.sampling_params import StructuredOutputsParams

    rng = random.Random(5)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(100, 400) for _ in range(length)]

    greedy = {"temperature": 0.0, "max_tokens": 18, "ignore_eos": True, "logprobs": 1}
    seeded = greedy | {"temperature": 0.9, "seed": 11}
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.7}
    regex = {"structured_outputs": StructuredOutputsParams(regex=REGEX), "ignore_eos": False}
    same_prompt = prompt(5)
    plain = prompt(20)
    return {
        "prompt_logprobs": Job(prompt(2 * CHUNK + 5), greedy | {"prompt_logprobs": 1}),
        "allowed": Job(prompt(2 * CHUNK), seeded | {"allowed_token_ids": list(range(40, 60))}),
        "greedy": Job(plain, greedy),
        "stop string": Job(plain, greedy | {"stop": [stop]}),
        "min_p": Job(prompt(7), seeded | {"min_p": 0.02}),
        "penalties": Job(prompt(9), greedy | penalties),
        # The stop token is wanted from the first step on.
        "min_tokens": Job(
            prompt(6),
            greedy | {"min_tokens": MIN_TOKENS, "stop_token_ids": [STOP], "logit_bias": {STOP: 90}},
        ),
        "unseeded": Job(same_prompt, greedy | {"temperature": 1.0}),
        "unseeded again": Job(same_prompt, greedy | {"temperature": 1.0}),
        "regex": Job(prompt(8), seeded | regex),
        "long": Job(prompt(4 * CHUNK), greedy),
    }


def few(jobs: Mapping[str, Any]) -> dict[str, Any]:
    """The `FEW` of jobs, or of their outcomes."""
    return {name: jobs[name] for name in jobs if name in FEW}


# ---------------------------------------------------------------- ways through the layouts


def tour(layouts: Sequence[T]) -> list[T]:
    """A way from the first layout and back that takes every ordered pair once."""
    left = {layout: [other for other in layouts if other != layout] for layout in layouts}
    way: list[T] = []
    stack = [layouts[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop(0))
        else:
            way.append(stack.pop())
    return way[::-1]


class Walk:
    """Before each step: switches to the next layout, if the fastest request has made its tokens.

    Attributes:
        left: where it has not been yet.
        at_switch: called after each switch.
    """

    def __init__(
        self,
        llm: Any,
        way: Sequence[int],
        tokens: int,
        at_switch: Callable[[int], object],
    ) -> None:
        self.left = list(way)
        self.at_switch = at_switch
        self._llm = llm
        self._tokens = tokens
        self._due = 0
        # Like schedulers with many steps behind them; each has fewer than the one before it.
        self._behind = 100

    def __call__(self, step: int) -> None:
        if self.left and most_tokens(self._llm) >= self._due:
            # The second layout is entered as soon as one request has a token: others have
            # half-computed prompts.
            self._due += self._tokens if self._due else 1
            tp = self.left.pop(0)
            assert pat_vllm.switch(self._llm, tp=tp)
            self._behind -= 1
            for replica in scheduler_of(self._llm).replica_set.replicas:
                replica.scheduler.current_step = 100_000 * self._behind
            self.at_switch(tp)


def most_tokens(llm: Any) -> int:
    """Tokens that the fastest unfinished request has generated."""
    requests = [
        request.num_output_tokens
        for replica in scheduler_of(llm).replica_set.replicas
        for request in replica.scheduler.requests.values()
    ]
    return max(requests, default=0)


# ---------------------------------------------------------------- what must be equal


def assert_same(
    found: Mapping[str, Outcome],
    static: Mapping[str, Outcome],
    unseeded: Container[str] = UNSEEDED,
) -> None:
    """What came back is what one layout gives, log-probabilities to the tolerance.

    Args:
        unseeded: requests whose tokens no other run can tell.
    """
    assert found.keys() == static.keys()
    for name, outcome in found.items():
        expected = static[name]
        assert len(outcome.token_ids) == len(expected.token_ids), name
        assert outcome.prompt_logprobs == close(expected.prompt_logprobs), name
        if name.split("/")[0] not in unseeded:
            assert outcome.token_ids == expected.token_ids, name
            assert outcome.logprobs == close(expected.logprobs), name
            assert outcome.finish_reason == expected.finish_reason, name
            assert outcome.text == expected.text, name


def assert_teacher_forced(
    llm: Any,
    jobs: Mapping[str, Job],
    outcomes: Mapping[str, Outcome],
    unseeded: Container[str] = UNSEEDED,
) -> None:
    """Each sampled token has the log-probability that the home layout gives to it.

    For requests whose tokens no other run can tell: ranks that drew different ones would go on
    from different contexts.
    """
    names = [name for name in outcomes if name.split("/")[0] in unseeded]
    assert names
    scores = teacher_forced(llm, {n: (jobs[n].prompt, outcomes[n].token_ids) for n in names})
    for name, scored in scores.items():
        assert outcomes[name].logprobs == close(scored), name


def close(values: Sequence[float]) -> Any:
    """Compares equal to log-probabilities within the tolerance."""
    assert all(math.isfinite(one) for one in values)
    return pytest.approx(values, abs=PLAIN_TOLERANCE)


# ---------------------------------------------------------------- runs


def refresh(llm: Any) -> None:
    """Be at home, without requests and cached prefixes."""
    engine = llm.llm_engine
    if left := list(engine.output_processor.request_states):
        engine.abort_request(left, internal=True)
    scheduler_of(llm).replica_set.drain()
    assert pat_vllm.switch(llm, tp=pat_vllm.report(llm).layouts[0].tp)
    assert llm.reset_prefix_cache()


def run_static(llm: Any, jobs: Mapping[str, Job]) -> dict[str, Outcome]:
    """What comes back in the home layout."""
    refresh(llm)
    return run(llm, jobs)


def take_tour(
    llm: Any,
    jobs: Mapping[str, Job],
    way_of_kv: str = "migrate",
    at_switch: Callable[[int], object] = lambda tp: None,
    at_step: Callable[[int], object] = lambda step: None,
) -> dict[str, Outcome]:
    """Run jobs through every ordered pair of layouts, with KV carried as asked for."""
    refresh(llm)
    sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]
    way = tour(sizes)
    walk = Walk(llm, way, tokens=12 // (len(way) - 1), at_switch=at_switch)
    costs = scheduler_of(llm).controller.costs
    before = len(pat_vllm.report(llm).switches)
    stock, costs.mode = costs.mode, way_of_kv

    def before_step(step: int) -> None:
        at_step(step)
        walk(step)

    try:
        outcomes = run(llm, jobs, before_step)
    finally:
        costs.mode = stock
    assert not walk.left, "the requests ended before the tour"
    made = [one for one in pat_vllm.report(llm).switches[before:] if one.reason == "forced"]
    assert [(one.source.tp, one.target.tp) for one in made] == list(itertools.pairwise(way))
    for one in made:
        assert one.num_seqs >= len(jobs) // 2
        carried, left_behind = one.migrated, one.recomputed
        if way_of_kv == "recompute":
            carried, left_behind = left_behind, carried
            assert left_behind == 0
        assert carried > 0
    return outcomes


def check_outcomes(
    llm: Any,
    jobs: Mapping[str, Job],
    outcomes: Mapping[str, Outcome],
    static: Mapping[str, Outcome],
    unseeded: Container[str] = UNSEEDED,
) -> None:
    """Outcomes of a tour are those of the home layout, and no layout keeps requests."""
    assert_same(outcomes, static, unseeded)
    assert not any(llm.collective_rpc(idle_requests))
    assert_teacher_forced(llm, jobs, outcomes, unseeded)


def check_tour(
    llm: Any, jobs: Mapping[str, Job], static: Mapping[str, Outcome], **options: Any
) -> None:
    """A tour, see `take_tour` for options, gives what the home layout gives."""
    check_outcomes(llm, jobs, take_tour(llm, jobs, **options), static)

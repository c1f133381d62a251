"""Requests for engines with Model Runner V2, ways through the layouts, and what must be equal."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest

import pat_vllm
from tests.engine.specs import V2_CHUNK
from tests.engine.speculation.batch import copies_of
from tests.engine.v2.in_workers import idle_requests, runner_module
from tests.support.counting import STOP_THINKING, THINK, counted
from tests.support.engines import Job, Outcome, run, scheduler_of
from tests.support.models import random_model
from tests.support.pool import go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same, assert_teacher_forced, of_batch

T = TypeVar("T", int, str)
STOP = 77
MIN_TOKENS = 10
REGEX = "(ab|cd){3}-[0-9]{8}"
UNSEEDED = {"unseeded", "unseeded again"}
FEW = {"long", "penalties", "min_p", "unseeded", "greedy", "thinking", "counted in dict"}
"""Of the batch, what shows most, where all of it would take long."""


@dataclass(frozen=True)
class Served:
    """An engine and what it runs.

    Attributes:
        jobs: the batch.
        static: what the batch gives in the default layout, without drafts.
        sampled: requests whose tokens no other run can tell.
    """

    llm: Any
    jobs: dict[str, Job]
    static: dict[str, Outcome]
    sampled: Container[str]

    @property
    def asynchronous(self) -> bool:
        """Whether two steps are in flight."""
        config = self.llm.llm_engine.vllm_config
        return bool(config.scheduler_config.async_scheduling)

    def check_sampled(self, jobs: Mapping[str, Job], outcomes: Mapping[str, Outcome]) -> None:
        """Sampled tokens have the log-probabilities that the engine gives to them now."""
        drawn = {
            name: outcome for name, outcome in outcomes.items() if of_batch(name) in self.sampled
        }
        assert_teacher_forced(self.llm, jobs, drawn, PLAIN_TOLERANCE)

    def few(self) -> Served:
        """With the `FEW`."""
        jobs = {name: job for name, job in self.jobs.items() if name in FEW}
        return replace(self, jobs=jobs, static={name: self.static[name] for name in jobs})


def serve(
    llm: Any, jobs_of: Callable[[str], dict[str, Job]], sampled: Container[str] = UNSEEDED
) -> Served:
    """Have an engine run a batch in the default layout.

    Args:
        jobs_of: the batch, by what its "stop string" ends with.
    """
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    assert set(llm.collective_rpc(runner_module)) == {"vllm.v1.worker.cpu.model_runner"}
    greedy = run_static(llm, {"greedy": jobs_of("")["greedy"]})["greedy"].text
    jobs = jobs_of(greedy[len(greedy) // 2 :][:3])
    static = run_static(llm, jobs)
    go_home(llm)
    # The batch asks for what it should.
    assert static["stop string"].finish_reason == "stop"
    assert re.search(REGEX + r"\Z", static["regex"].text)
    prompt = jobs["prompt_logprobs"].prompt
    assert len(static["prompt_logprobs"].prompt_logprobs) == len(prompt) - 1
    assert static["thinking"].text.count(STOP_THINKING) == 1
    return Served(llm, jobs, static, sampled)


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
        "prompt_logprobs": Job(prompt(2 * V2_CHUNK + 5), greedy | {"prompt_logprobs": 1}),
        "allowed": Job(prompt(2 * V2_CHUNK), seeded | {"allowed_token_ids": list(range(40, 60))}),
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
        "thinking": Job([*prompt(7), *encoded(THINK)], greedy | {"thinking_token_budget": 2}),
        "counted in dict": Job(prompt(9), greedy | counted("dict")),
        "counted in array": Job(prompt(9), greedy | counted("array")),
        "long": Job(prompt(4 * V2_CHUNK), greedy),
    }


def encoded(text: str) -> list[int]:
    """Tokens of a text; the random models have one tokenizer."""
    from transformers import AutoTokenizer

    tokens: list[int] = AutoTokenizer.from_pretrained(random_model("qwen3")).encode(text)
    return tokens


# ---------------------------------------------------------------- ways through the layouts


def sizes_of(llm: Any) -> list[int]:
    """The tp of an engine's layouts, the default one first."""
    return [layout.tp for layout in pat_vllm.report(llm).layouts]


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
    assert len(way) == 1 + len(layouts) * (len(layouts) - 1) == 1 + len({*itertools.pairwise(way)})
    return way[::-1]


class Walk:
    """Before each step: switches to the next layout, if the fastest request has made its tokens.

    Attributes:
        left: where it has not been yet.
    """

    def __init__(
        self, llm: Any, way: Sequence[int], tokens: int, at_switch: Callable[[int], object]
    ) -> None:
        """`at_switch` is called after each switch."""
        self.left = list(way)
        self._at_switch = at_switch
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
            self._at_switch(tp)


def most_tokens(llm: Any) -> int:
    """Tokens that the fastest unfinished request has generated."""
    requests = [
        request.num_output_tokens
        for replica in scheduler_of(llm).replica_set.replicas
        for request in replica.scheduler.requests.values()
    ]
    return max(requests, default=0)


@contextmanager
def kv_carried(llm: Any, choose: Callable[[], str]) -> Iterator[None]:
    """Inside, each request at a switch has its KV migrated or computed again, as chosen."""
    costs = scheduler_of(llm).controller.costs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "choose", lambda *request: choose())
        yield


# ---------------------------------------------------------------- runs


def run_static(llm: Any, jobs: Mapping[str, Job]) -> dict[str, Outcome]:
    """What comes back in the default layout."""
    go_home(llm)
    return run(llm, jobs)


def take_tour(
    llm: Any,
    jobs: Mapping[str, Job],
    way_of_kv: str = "migrate",
    at_switch: Callable[[int], object] = lambda tp: None,
    at_step: Callable[[int], object] = lambda step: None,
) -> dict[str, Outcome]:
    """Run jobs through every ordered pair of layouts, with KV carried as asked for."""
    go_home(llm)
    way = tour(sizes_of(llm))
    walk = Walk(llm, way, tokens=12 // (len(way) - 1), at_switch=at_switch)
    began = len(pat_vllm.report(llm).switches)

    def before_step(step: int) -> None:
        at_step(step)
        walk(step)

    with kv_carried(llm, lambda: way_of_kv):
        outcomes = run(llm, jobs, before_step)
    assert not walk.left, "the requests ended before the tour"
    switches = [
        switch for switch in pat_vllm.report(llm).switches[began:] if switch.reason == "forced"
    ]
    assert [(switch.source.tp, switch.target.tp) for switch in switches] == [
        *itertools.pairwise(way)
    ]
    for switch in switches:
        assert switch.num_seqs >= len(jobs) // 2
        if way_of_kv == "migrate":
            assert switch.migrated > 0
        else:
            assert switch.recomputed > 0 == switch.migrated
    return outcomes


def check_tour(served: Served, **options: Any) -> None:
    """A tour, see `take_tour`, gives what the default layout does, and leaves no requests."""
    llm = served.llm
    outcomes = take_tour(llm, served.jobs, **options)
    assert_same(outcomes, served.static, PLAIN_TOLERANCE, served.sampled)
    assert not any(llm.collective_rpc(idle_requests))
    served.check_sampled(served.jobs, outcomes)


def check_storm(
    served: Served,
    copies: int,
    spread: int,
    at_step: Callable[[int], object] = lambda step: None,
) -> list[Any]:
    """Random switches under streams that come, go and are given up: no token is lost or doubled.

    Args:
        copies: of each request.
        spread: steps for each copy, in which the requests come.

    Returns:
        The switches with requests.
    """
    from vllm.sampling_params import RequestOutputKind

    llm, static = served.llm, served.static
    go_home(llm)
    rng = random.Random(copies)
    arrivals = [lambda: rng.randint(0, spread * copies)] * copies
    delta = {"output_kind": RequestOutputKind.DELTA}
    jobs = {
        name: replace(job, sampling=job.sampling | delta)
        for name, job in copies_of(served.jobs, arrivals).items()
    }
    expected = {name: static[of_batch(name)] for name in jobs}
    whole = sorted(name for name in jobs if expected[name].finish_reason == "length")
    given_up = {name: rng.randint(1, 8) for name in rng.sample(whole, 2 * copies)}
    waiting = dict(given_up)
    seen: dict[str, Outcome] = {}
    due = 0

    def before_step(step: int) -> None:
        nonlocal due
        at_step(step)
        for name, tokens in list(waiting.items()):
            if name in seen and len(seen[name].token_ids) >= tokens:
                del waiting[name]
                llm.llm_engine.abort_request([name])
        if sum(len(outcome.token_ids) for outcome in seen.values()) >= due:
            due += rng.randint(3, 16)
            here = pat_vllm.report(llm).layout.tp
            assert pat_vllm.switch(llm, tp=rng.choice([tp for tp in sizes_of(llm) if tp != here]))

    began = len(pat_vllm.report(llm).switches)
    with kv_carried(llm, lambda: rng.choice(("migrate", "migrate", "recompute"))):
        finished = run(llm, jobs, before_step, seen)

    assert not waiting
    for name, count in given_up.items():
        tokens = seen[name].token_ids
        assert len(tokens) >= count
        if of_batch(name) not in served.sampled:
            assert tokens == expected[name].token_ids[: len(tokens)], name
    done = {name: outcome for name, outcome in finished.items() if name not in given_up}
    finish = {name: expected[name] for name in jobs.keys() - given_up}
    assert_same(done, finish, PLAIN_TOLERANCE, served.sampled)
    switches = [switch for switch in pat_vllm.report(llm).switches[began:] if switch.num_seqs]
    assert len(switches) >= 6 * copies
    served.check_sampled(jobs, done)
    return switches

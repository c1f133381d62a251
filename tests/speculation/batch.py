"""Requests of a model that repeats itself, ways through the layouts, and what must be equal."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import pat_vllm
from tests.engines import Job, Outcome, engine, run, scheduler_of
from tests.models import phrase
from tests.speculation.steps import (
    LENGTHS,
    MOST,
    SPECULATIVE,
    Watch,
    acceptance,
    name_of,
    requests_of,
    switch,
    watched,
)
from tests.test_switch import TOLERANCE

MODEL = "repeating"
CHUNK = 96
OPTIONS: dict[str, Any] = {
    "disable_log_stats": False,
    "scheduling_policy": "priority",
    # On CPU vLLM cannot prefill a seeded request in chunks, so short ones must not be.
    "max_num_batched_tokens": 1200,
    "long_prefill_token_threshold": CHUNK,
    "max_logprobs": 8,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    # Of tp=1: about 4,000 tokens a replica.
    "kv_cache_memory_bytes": 12 << 20,
}


def stock() -> Any:
    """An engine of stock vLLM's, of one rank and without speculation; a context manager."""
    # Its metrics would take the place of the other engine's in this process.
    return engine(MODEL, 1, None, **{**OPTIONS, "disable_log_stats": True})


@contextmanager
def speculating(ranks: int, usual: int = MOST, model: str = MODEL, **options: Any) -> Iterator[Any]:
    """An engine with PAT that speculates, and switches only when told.

    Args:
        usual: its draft length, unless another is asked for.
    """
    config = SPECULATIVE | {"num_speculative_tokens_per_batch_size": [(1, 512, usual)]}
    pat = {"kv_transfer": "migrate", **options.pop("pat", {})}
    options = {**OPTIONS, "speculative_config": config, **options}
    with engine(model, ranks, pat, **options) as llm:
        yield llm


def batch(requests: int = 6, longest: int = 72, **sampling: Any) -> dict[str, Job]:
    """Greedy requests, half of whose prompts are text of the model's own kind."""
    rng = random.Random(3)
    jobs = {}
    for i in range(requests):
        length = rng.randint(6, 120)
        prompt = [rng.randrange(3, 400) for _ in range(length)]
        if i % 2:
            prompt[-40:] = phrase(MODEL, min(length, 40), start=i)
        greedy = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        tokens = rng.randint(longest // 2, longest)
        jobs[f"r{i}"] = Job(prompt, greedy | {"max_tokens": tokens} | sampling)
    return jobs


def assert_same(
    found: Mapping[str, Outcome], expected: Mapping[str, Outcome], tolerance: float = TOLERANCE
) -> None:
    """Tokens and the reason to end are equal, log-probabilities to the tolerance."""
    assert found.keys() == expected.keys()
    for name, outcome in found.items():
        assert outcome.token_ids == expected[name].token_ids, name
        assert outcome.logprobs == pytest.approx(expected[name].logprobs, abs=tolerance), name
        assert outcome.finish_reason == expected[name].finish_reason, name
        assert outcome.text == expected[name].text, name


def start_step(llm: Any) -> None:
    """Start a step in each replica, and leave it in flight."""
    core = llm.llm_engine.engine_core.engine_core
    step = core.scheduler.schedule()
    core.model_executor.execute_model(step, non_block=True)
    core.model_executor.sample_tokens(None, non_block=True)


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
        way: Sequence[int] | Sequence[str],
        expected: Mapping[str, Outcome],
        watch: Watch,
        rng: random.Random,
        lengths: Sequence[int] = LENGTHS,
        in_flight: bool = False,
    ) -> None:
        """With `in_flight`, drafts are being verified when a switch comes."""
        self.left: list[int | str] = list(way)
        self.dropped = self.verified = 0
        self._llm = llm
        self._expected = expected
        self._watch = watch
        self._rng = rng
        self._lengths = lengths
        self._in_flight = in_flight
        self._due = 0
        self._tokens: dict[str, int] = {}

    def __call__(self, step: int) -> None:
        if step == 0:
            assert pat_vllm.switch(self._llm, tp=self.left.pop(0))
        elif self._inside_a_run() and self.left and step >= self._due:
            self._due = step + self._rng.randint(1, 3)
            before = {name_of(one): one.num_output_tokens for one in requests_of(self._llm)}
            if self._in_flight:
                start_step(self._llm)
            dropped = switch(self._llm, tp=self.left.pop(0))
            assert dropped or self._in_flight
            self.dropped += sum(map(len, dropped.values()))
            for one in requests_of(self._llm):
                self.verified += max(0, one.num_output_tokens - before[name_of(one)] - 1)
        self._watch.k = self._rng.choice(self._lengths)
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
    way: Sequence[int] | Sequence[str],
    jobs: Mapping[str, Job],
    expected: Mapping[str, Outcome],
    tolerance: float = TOLERANCE,
    seed: int = 0,
    **options: Any,
) -> tuple[dict[str, Outcome], Walk]:
    """Run jobs through layouts; the outcomes are as expected. For options see `Walk`."""
    assert llm.reset_prefix_cache()
    with watched() as watch, acceptance(llm):
        walk = Walk(llm, way, expected, watch, random.Random(seed), **options)
        found = run(llm, jobs, before_step=walk)
    assert not walk.left, "the requests ended before the way"
    assert walk.verified if options.get("in_flight") else walk.dropped
    assert watch.drafts > 10
    assert_same(found, expected, tolerance)
    return found, walk


def sizes_of(llm: Any) -> list[int]:
    """The layouts of an engine, by tp."""
    return [layout.tp for layout in pat_vllm.report(llm).layouts]


def leave_clean(llm: Any) -> None:
    """Be at home, without requests, cached prefixes and a draft length that was asked for."""
    front = llm.llm_engine
    if left := list(front.output_processor.request_states):
        front.abort_request(left, internal=True)
    scheduler_of(llm).replica_set.drain()
    pat_vllm.speculate(llm, None)
    assert pat_vllm.switch(llm, tp=sizes_of(llm)[0])
    assert llm.reset_prefix_cache()

"""New weights while requests run, without a pause, in a storm of updates and switches.

Each request must give what stock vLLM gives that gets the same weights at the same tokens, and
afterwards every layout what it gives with the last ones.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import FOUR_RANKS
from tests.engine.test_switch import at_steps
from tests.engine.test_weight_updates import (  # noqa: F401
    PLAIN,
    Updated,
    generated,
    load_all,
    phases,
    transfer,
    updated,
)
from tests.support.engines import Job, Outcome, engine, run, scheduler_of
from tests.support.pool import go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same

pytestmark = pytest.mark.engine(FOUR_RANKS)


@dataclass
class Storm:
    """What comes to an engine while its requests run.

    Attributes:
        landed: by request, which weights came at how many of its tokens; the first are those that
            it began with.
        layouts: in which weights came to running requests.
        updates: how many times. They come in each way in turn.
    """

    updated: Updated
    jobs: Mapping[str, Job]
    rng: random.Random
    landed: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    layouts: set[int] = field(default_factory=set)
    updates: int = 0
    _to_come: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.updated.old
        self.ways: list[Callable[[Any, str], Any]] = [*self.updated.updates]
        if transfer in self.ways:
            self.ways.insert(0, phases)

    def before_step(self, step: int) -> None:
        """A phase of a transfer, a switch, an update, or nothing."""
        llm, chance = self.updated.llm, self.rng.random()
        if self._to_come:
            self._to_come.pop(0)()
        elif chance < 0.3:
            assert pat_vllm.switch(llm, tp=self.rng.choice(self.updated.layouts))
        elif chance < 0.5:
            self._update(self.ways[self.updates % len(self.ways)])
        for name, job in self.jobs.items():
            if job.arrives == step:
                self.landed[name] = [(0, self.model)]

    def _update(self, how: Callable[[Any, str], Any]) -> None:
        llm = self.updated.llm
        computed = _computed(llm)
        if min(computed.values(), default=0) < 0:
            return
        self.updates += any(computed.values())
        (self.model,) = {self.updated.old, self.updated.new} - {self.model}
        for name, tokens in computed.items():
            self.landed[name].append((tokens, self.model))
            if 0 < tokens < self.jobs[name].sampling["max_tokens"]:
                self.layouts.add(pat_vllm.report(llm).layout.tp)
        # The phases of a transfer have steps in between, in which requests wait.
        if (calls := how(llm, self.model)) is not None:
            self._to_come += calls
            self._to_come.pop(0)()

    def end(self) -> None:
        """What is left of a transfer."""
        while self._to_come:
            self._to_come.pop(0)()


def _computed(llm: Any) -> dict[str, int]:
    """Of each request, the tokens that are there or that a step in flight computes.

    Less than 0: a part of its prompt is computed.
    """
    computed = {}
    for replica in scheduler_of(llm).replica_set.replicas:
        for request in replica.scheduler.requests.values():
            begun = request.num_computed_tokens
            tokens = begun - request.num_prompt_tokens + 1 if begun else 0
            # A prompt but for its last token would else count as none.
            computed[request.request_id.rpartition("-")[0]] = tokens or -bool(begun)
    return computed


def one_by_one(
    llm: Any, jobs: Mapping[str, Job], landed: Mapping[str, list[tuple[int, str]]]
) -> dict[str, Outcome]:
    """Each request alone, with the same weights at the same tokens."""
    outcomes: dict[str, Outcome] = {}
    for name, job in jobs.items():
        to_come = dict(landed[name])  # of several at one token, the last

        def before_step(step: int, to_come: dict[int, str] = to_come) -> None:
            tokens = generated(llm) if step else 0
            if tokens in to_come:
                load_all(llm, to_come.pop(tokens))

        assert llm.reset_prefix_cache()
        outcomes |= run(llm, {name: job}, before_step)
    return outcomes


@contextlib.contextmanager
def reference(updated: Updated) -> Iterator[Any]:  # noqa: F811
    """Stock vLLM; of a mixture the engine itself in its base layout, since stock vLLM packs experts
    on CPU, which no update reaches."""
    if updated.old != "qwen3":
        go_home(updated.llm)
        yield updated.llm
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # this process has no Triton
        with engine(updated.old, 1, None, **PLAIN) as llm:
            yield llm


def check_storm(updated: Updated, seed: int, count: int) -> None:  # noqa: F811
    """`count` requests."""
    llm, rng = updated.llm, random.Random(seed)
    sampling = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    jobs = {
        f"r{i}": Job(
            [rng.randrange(3, 400) for _ in range(rng.randint(3, 60))],
            sampling | {"max_tokens": rng.randint(15, 40)},
            arrives=rng.randrange(2 * count),
        )
        for i in range(count)
    }
    storm = Storm(updated, jobs, rng)
    switches = len(pat_vllm.report(llm).switches)
    outcomes = run(llm, jobs, storm.before_step)
    storm.end()
    assert len(pat_vllm.report(llm).switches) - switches >= 5
    assert len(storm.layouts) >= 2 and storm.updates >= len(storm.ways)
    under_way = [
        tokens
        for name, landed in storm.landed.items()
        for tokens, _ in landed
        if 0 < tokens < len(outcomes[name].token_ids)
    ]
    assert len(under_way) >= count
    llm.reset_prefix_cache()
    for tp in updated.layouts:
        updated.check(storm.model, at_steps(llm, {0: tp}))
    with reference(updated) as other:
        assert_same(outcomes, one_by_one(other, jobs, storm.landed), PLAIN_TOLERANCE)


def test_a_storm_of_updates(updated: Updated) -> None:  # noqa: F811
    check_storm(updated, seed=0, count=8)

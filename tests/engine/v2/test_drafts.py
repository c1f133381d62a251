"""Speculation with Model Runner V2: n-gram drafts, whose length changes at each step.

Of a mixture of experts. Greedy requests
give what they give without drafts, log-probabilities included. "ngram_gpu" has two steps in flight.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import pat_vllm
from pat_vllm.models.model_size import ModelSize
from pat_vllm.scheduler.replica import Replica
from pat_vllm.start.buffers import EngineShape, all_buffers
from tests.engine.specs import V2_CHUNK, V2_DRAFTS, V2_NGRAM
from tests.engine.speculation.steps import counted
from tests.engine.test_memory import TOLERANCE, allocated
from tests.engine.v2.batch import (
    UNSEEDED,
    Served,
    batch,
    check_storm,
    check_tour,
    encoded,
    serve,
    sizes_of,
)
from tests.engine.v2.in_workers import searches
from tests.support import ngram
from tests.support.counting import THINK
from tests.support.draft_prints import alike
from tests.support.engines import Job, Outcome, run, scheduler_of
from tests.support.models import phrase, random_model
from tests.support.pool import EnginePool, EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same

pytestmark = pytest.mark.engine(V2_DRAFTS)

LENGTHS = (0, 1, 2, 3)
TOKENS = 40
WORDS = "(ab){18}"
REFUSED = ("min_p", "logit_bias")
SAMPLED = {*UNSEEDED, "allowed", "min_p"}
"""Requests whose tokens depend on which of them are drafted."""


def repeating(stop: str) -> dict[str, Job]:
    """The batch of the other tests, in the model's own phrase, and greedy where it has grammars.

    Without what vLLM refuses beside speculation.
    """
    from vllm.sampling_params import StructuredOutputsParams

    jobs = {}
    for start, (name, job) in enumerate(batch(stop).items()):
        length = len(job.prompt) + (0 if len(job.prompt) > V2_CHUNK else 18)
        sampling = {key: value for key, value in job.sampling.items() if key not in REFUSED}
        text = phrase("repeating", length, start)
        if name == "thinking":
            text = [*text, *encoded(THINK)]
        jobs[name] = Job(text, sampling | {"max_tokens": TOKENS})
    regex = jobs["regex"].sampling | {"temperature": 0.0}
    words = {"structured_outputs": StructuredOutputsParams(regex=WORDS)}
    jobs["regex"] = replace(jobs["regex"], sampling=regex)
    jobs["words"] = replace(jobs["regex"], sampling=regex | words)
    return jobs


@pytest.fixture
def served(llm: Any, engines: EnginePool) -> Served:
    """The engine, and its batch, which has no drafts unless a length is asked for."""
    return engines.keep("served", lambda: serve(llm, repeating, SAMPLED))


def greedy_jobs(served: Served) -> dict[str, Job]:
    """A short prompt and one of several steps."""
    return {name: served.jobs[name] for name in ("greedy", "long")}


def run_at(
    llm: Any, jobs: dict[str, Job], length: Callable[[], int], tp: int = 1
) -> dict[str, Outcome]:
    """Run jobs in a layout, asking for a draft length before each step."""
    go_home(llm)
    assert pat_vllm.switch(llm, tp=tp)
    return run(llm, jobs, lambda step: pat_vllm.speculate(llm, length()))


def longest() -> int:
    return LENGTHS[-1]


def accepted_share(llm: Any, before: tuple[int, int]) -> float:
    """Of the drafts verified since some were counted."""
    drafted, accepted = (now - then for now, then in zip(counted(llm), before, strict=True))
    return accepted / max(1, drafted)


# ---------------------------------------------------------------- no drafts


def test_steps_without_drafts_look_for_none(served: Served) -> None:
    """Steps of draft length 0 look for no n-grams. Others do, on all ranks of a group."""
    llm, jobs, widest = served.llm, greedy_jobs(served), sizes_of(served.llm)[-1]
    llm.collective_rpc(searches)
    run_at(llm, jobs, lambda: 0, widest)
    assert not any(llm.collective_rpc(searches))
    run_at(llm, jobs, longest, widest)
    assert all(llm.collective_rpc(searches))


def test_greedy_tokens_are_the_models_own(served: Served, spec: EngineSpec) -> None:
    """Or the others would be compared with something else."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(random_model(spec.model), dtype="float32")
    for name in ("greedy", "long"):
        (tokens,) = ngram.generate(model, [served.jobs[name].prompt], TOKENS)
        assert served.static[name].token_ids == tokens, name


def test_buffers_are_as_computed(served: Served, spec: EngineSpec) -> None:
    """Of each layout, those that no layout before has, but for half a KiB of each request."""
    llm = served.llm
    config = json.loads((random_model(spec.model) / "config.json").read_text())
    shape = EngineShape(
        tuple(pat_vllm.report(llm).layouts),
        max_num_seqs=spec.options["max_num_seqs"],
        max_num_batched_tokens=V2_CHUNK,
        max_model_len=spec.options["max_model_len"],
        block_size=32,
        attention="CPU_ATTN",
        num_speculative_tokens=V2_NGRAM["num_speculative_tokens"],
    )
    buffers = all_buffers(ModelSize.of(config, dtype_bytes=4), shape)
    expected = [sum(buffer.on_cpu for buffer in of_layout) for of_layout in buffers]
    for rank in llm.collective_rpc(allocated):
        for size, computed, largest in zip(rank["runners"], expected, rank["largest"], strict=True):
            assert size == pytest.approx(computed, rel=3 * TOLERANCE), largest
    go_home(llm)  # what KV there was has moved


# ---------------------------------------------------------------- switches


class Lengths:
    """Asks for another draft length before each step, and looks at each switch.

    Attributes:
        carried: requests that were carried, drafts of theirs in flight.
    """

    def __init__(self, llm: Any, seed: int) -> None:
        self.carried = 0
        self._llm = llm
        self._rng = random.Random(seed)

    def at_step(self, step: int) -> None:
        pat_vllm.speculate(self._llm, self._rng.choice(LENGTHS))

    def at_switch(self, tp: int) -> None:
        for replica in scheduler_of(self._llm).replica_set.replicas:
            for request in replica.scheduler.requests.values():
                self.carried += bool(request.num_output_tokens)
                assert not request.spec_token_ids, "drafts of another layout"


@pytest.mark.parametrize("way_of_kv", ["migrate"])
def test_every_ordered_pair_of_layouts(served: Served, way_of_kv: str) -> None:
    """While the draft length changes."""
    llm = served.llm
    lengths = Lengths(llm, seed=1)
    before = counted(llm)
    check_tour(served, way_of_kv=way_of_kv, at_switch=lengths.at_switch, at_step=lengths.at_step)
    assert lengths.carried
    assert 0.3 < accepted_share(llm, before) < 1


@pytest.mark.parametrize("copies", [1])
def test_storm(served: Served, copies: int) -> None:
    """With random draft lengths."""
    lengths = Lengths(served.llm, seed=copies)
    with alike(served.llm):
        check_storm(served.few(), copies, spread=20, at_step=lengths.at_step)


# ---------------------------------------------------------------- grammars


def test_grammars_see_the_drafts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar sees the drafts of the step before, and accepts some; no other step sends any."""
    llm = served.llm
    jobs = {name: served.jobs[name] for name in ("greedy", "regex", "words", "min_p")}
    original = Replica.finish
    replies = []

    def finish(replica: Replica, output: Any, drafts: Any) -> Any:
        step = replica.in_flight[0]
        constrained = step.has_structured_output_requests
        if drafts is None:
            assert served.asynchronous and not constrained
        else:
            replies.append(constrained)
            assert constrained or not served.asynchronous
            assert drafts.req_ids == output.req_ids
            lengths = {len(token_ids) for token_ids in drafts.draft_token_ids}
            assert lengths == {step.num_spec_tokens_to_schedule}
        return original(replica, output, drafts)

    monkeypatch.setattr(Replica, "finish", finish)
    before = counted(llm)
    outcomes = run_at(llm, {name: jobs[name] for name in ("regex", "words")}, longest)
    assert accepted_share(llm, before) > 0.2
    rng = random.Random(5)
    outcomes |= run_at(llm, jobs, lambda: rng.choice(LENGTHS))
    assert True in replies
    static = {name: served.static[name] for name in jobs}
    assert_same(outcomes, static, PLAIN_TOLERANCE, SAMPLED)

"""Speculation with Model Runner V2: n-gram drafts, whose length changes at each step.

Greedy requests give what they give without drafts, log-probabilities included. "ngram_gpu" has two
steps in flight; "ngram" has one, as vLLM runs it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

import pat_vllm
from pat_vllm.memory.buffers import EngineShape, all_buffers
from pat_vllm.memory.model import ModelShape
from pat_vllm.patches import drafts
from pat_vllm.scheduler.replica import Replica
from tests.engines import Job, Outcome, engine, run, scheduler_of
from tests.models import phrase, random_model
from tests.support import ngram
from tests.support.v2_on_cpu.v2_on_cpu import scheduled_asynchronously
from tests.test_engine_memory import TOLERANCE, allocated
from tests.v2.batch import (
    CHUNK,
    PLACES,
    UNSEEDED,
    assert_same,
    assert_teacher_forced,
    batch,
    check_outcomes,
    few,
    refresh,
    take_tour,
)
from tests.v2.in_workers import searches
from tests.v2.mistakes import Mistake, made
from tests.v2.test_storm import Storm, of_batch

pytestmark = pytest.mark.slow

MODEL = "repeating"
LENGTHS = (0, 1, 2, 3)
TOKENS = 40
WORDS = "(ab){18}"
REFUSED = ("min_p", "logit_bias")
SAMPLED = {*UNSEEDED, "allowed", "min_p"}
"""Requests whose tokens depend on which of them are drafted."""


@dataclass(frozen=True)
class Speculating:
    """An engine that speculates, what it runs, and what that gives in the home layout without."""

    llm: Any
    jobs: dict[str, Job]
    static: dict[str, Outcome]

    @property
    def asynchronous(self) -> bool:
        """Whether two steps are in flight."""
        config = self.llm.llm_engine.vllm_config
        return bool(config.scheduler_config.async_scheduling)


def repeating_jobs(stop: str) -> dict[str, Job]:
    """The batch of the other tests, in the model's own phrase, and greedy where it has grammars.

    Without what vLLM refuses beside speculation.
    """
    jobs = {}
    for start, (name, job) in enumerate(batch(stop).items()):
        prompt = phrase(MODEL, len(job.prompt) + (0 if len(job.prompt) > CHUNK else 18), start)
        sampling = {key: one for key, one in job.sampling.items() if key not in REFUSED}
        jobs[name] = Job(prompt, sampling | {"max_tokens": TOKENS})
    regex = jobs["regex"].sampling | {"temperature": 0.0}
    jobs["regex"] = replace(jobs["regex"], sampling=regex)
    words = {"structured_outputs": StructuredOutputsParams(regex=WORDS)}
    jobs["words"] = replace(jobs["regex"], sampling=regex | words)
    return jobs


def run_at(
    llm: Any, jobs: dict[str, Job], length: Callable[[], int], **options: Any
) -> dict[str, Outcome]:
    """Run jobs in the home layout, asking for a draft length before each step."""
    refresh(llm)
    return run(llm, jobs, lambda step: pat_vllm.speculate(llm, length()), **options)


def accepted_share(llm: Any, since: float) -> float:
    """Of the drafts verified since a time."""
    drafts = pat_vllm.report(llm, since=since).drafts
    return sum(one.accepted for one in drafts) / max(1, sum(one.drafted for one in drafts))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("ngram_gpu", 2), id="two, asynchronous"),
        pytest.param(("ngram", 2), id="two, synchronous", marks=pytest.mark.nightly),
        pytest.param(("ngram_gpu", 4), id="four, asynchronous", marks=pytest.mark.nightly),
    ],
)
def speculating(request: pytest.FixtureRequest, runner_v2: None) -> Iterator[Speculating]:
    method, ranks = request.param
    asynchronous = method == "ngram_gpu"
    with ExitStack() as stack:
        with scheduled_asynchronously() if asynchronous else nullcontext():
            llm = stack.enter_context(start(method, ranks))
        plain = run_at(llm, {"greedy": repeating_jobs("")["greedy"]}, lambda: 0)["greedy"].text
        jobs = repeating_jobs(stop=plain[len(plain) // 2 :][:3])
        served = Speculating(llm, jobs, run_at(llm, jobs, lambda: 0))
        assert served.asynchronous == asynchronous
        yield served


def start(method: str | None, ranks: int) -> Any:
    """An engine; a context manager."""
    speculative = {
        "method": method,
        "num_speculative_tokens": LENGTHS[-1],
        # None, unless a length is asked for.
        "num_speculative_tokens_per_batch_size": [(1, 512, 0)],
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
    }
    return engine(
        MODEL,
        ranks,
        {"kv_transfer": "migrate", "weights": "inplace"},
        worker_extension_cls="tests.support.weight_updates.WeightUpdates",
        speculative_config=speculative if method else None,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        max_model_len=256,
        max_num_seqs=PLACES + 2,
        max_num_batched_tokens=CHUNK,
    )


def longest() -> int:
    return LENGTHS[-1]


# ---------------------------------------------------------------- no drafts


def check_no_searches(served: Speculating) -> None:
    """Steps of draft length 0 look for no n-grams. Others do."""
    jobs = few(served.jobs)
    served.llm.collective_rpc(searches)
    run_at(served.llm, jobs, lambda: 0)
    assert not any(served.llm.collective_rpc(searches))
    run_at(served.llm, jobs, longest)
    assert all(served.llm.collective_rpc(searches))


def test_steps_without_drafts_look_for_none(speculating: Speculating) -> None:
    check_no_searches(speculating)


def test_greedy_tokens_are_the_models_own(speculating: Speculating) -> None:
    """Or the others would be compared with something else."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(random_model(MODEL), dtype="float32")
    for name in ("greedy", "long"):
        (tokens,) = ngram.generate(model, [speculating.jobs[name].prompt], TOKENS)
        assert speculating.static[name].token_ids == tokens, name


@pytest.mark.nightly
def test_without_drafts_an_engine_is_one_that_never_speculates(speculating: Speculating) -> None:
    with scheduled_asynchronously(), start(None, 2) as llm:
        refresh(llm)
        expected = run(llm, speculating.jobs)
    assert_same(speculating.static, expected)


def test_buffers_are_as_computed(speculating: Speculating) -> None:
    """Of each layout, those that no layout before has."""
    llm = speculating.llm
    refresh(llm)
    config = json.loads((random_model(MODEL) / "config.json").read_text())
    shape = EngineShape(
        tuple(pat_vllm.report(llm).layouts),
        max_num_seqs=PLACES + 2,
        max_num_batched_tokens=CHUNK,
        max_model_len=256,
        block_size=32,
        attention="CPU_ATTN",
        num_speculative_tokens=LENGTHS[-1],
        steps_in_flight=1 + speculating.asynchronous,
    )
    buffers = all_buffers(ModelShape.from_config(config, dtype_bytes=4), shape)
    expected = [sum(one.on_cpu for one in made) for made in buffers]
    for rank in llm.collective_rpc(allocated):
        for found, computed, largest in zip(
            rank["runners"], expected, rank["largest"], strict=True
        ):
            assert found == pytest.approx(computed, rel=TOLERANCE), largest
    refresh(llm)  # what KV there was has moved


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


def check_switches(served: Speculating, way_of_kv: str = "migrate") -> None:
    """Requests go through every pair of layouts while the draft length changes."""
    lengths = Lengths(served.llm, seed=1)
    since = pat_vllm.report(served.llm).timeline[-1].at
    outcomes = take_tour(
        served.llm, served.jobs, way_of_kv, at_switch=lengths.at_switch, at_step=lengths.at_step
    )
    assert lengths.carried
    assert 0.3 < accepted_share(served.llm, since) < 0.9
    check_outcomes(served.llm, served.jobs, outcomes, served.static, SAMPLED)


@pytest.mark.parametrize(
    "way_of_kv", ["migrate", pytest.param("recompute", marks=pytest.mark.nightly)]
)
def test_every_ordered_pair_of_layouts(speculating: Speculating, way_of_kv: str) -> None:
    check_switches(speculating, way_of_kv)


@pytest.mark.parametrize("copies", [1, pytest.param(8, marks=pytest.mark.nightly)])
def test_storm(copies: int, speculating: Speculating, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random switches and draft lengths under requests that come, go and are given up."""
    llm, static = speculating.llm, speculating.static
    refresh(llm)
    rng = random.Random(copies)
    costs = scheduler_of(llm).controller.costs
    ways = ("migrate", "migrate", "recompute")
    monkeypatch.setattr(costs, "choose", lambda *request: rng.choice(ways))
    jobs = {
        f"{name}/{copy}": replace(job, arrives=rng.randint(0, 20 * copies))
        for name, job in speculating.jobs.items()
        for copy in range(copies)
    }
    jobs = {name: stream(job) for name, job in jobs.items()}
    whole = sorted(name for name in jobs if static[of_batch(name)].finish_reason == "length")
    given_up = {name: rng.randint(1, 12) for name in rng.sample(whole, 2 * copies)}
    storm = Storm(llm, rng, dict(given_up))
    lengths = Lengths(llm, seed=copies)
    before = len(pat_vllm.report(llm).switches)

    def before_step(step: int) -> None:
        lengths.at_step(step)
        storm(step)

    finished = run(llm, jobs, before_step, storm.seen)

    assert not storm.given_up
    for name in given_up:
        tokens = storm.seen[name].token_ids
        assert len(tokens) >= given_up[name]
        if of_batch(name) not in SAMPLED:
            assert tokens == static[of_batch(name)].token_ids[: len(tokens)], name
    done = {name: one for name, one in finished.items() if name not in given_up}
    assert_same(done, {name: static[of_batch(name)] for name in jobs.keys() - given_up}, SAMPLED)
    assert len([one for one in pat_vllm.report(llm).switches[before:] if one.num_seqs]) > copies
    assert_teacher_forced(llm, jobs, done, SAMPLED)


def stream(job: Job) -> Job:
    """The same request, whose output comes piece by piece."""
    from vllm.sampling_params import RequestOutputKind

    return replace(job, sampling=job.sampling | {"output_kind": RequestOutputKind.DELTA})


@pytest.mark.nightly
def test_seeds_give_the_same_where_drafts_are_the_same(speculating: Speculating) -> None:
    jobs = {name: speculating.jobs[name] for name in ("allowed", "min_p", "penalties")}
    one, other = (run_at(speculating.llm, jobs, longest) for _ in range(2))
    assert_same(one, other)


# ---------------------------------------------------------------- grammars


def check_grammars(served: Speculating) -> None:
    """A grammar sees the drafts of the step before, and accepts some; no other step sends any."""
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
            lengths = {len(one) for one in drafts.draft_token_ids}
            assert lengths == {step.num_spec_tokens_to_schedule}
        return original(replica, output, drafts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "finish", finish)
        since = pat_vllm.report(served.llm).timeline[-1].at
        outcomes = run_at(served.llm, {name: jobs[name] for name in ("regex", "words")}, longest)
        assert accepted_share(served.llm, since) > 0.2
        rng = random.Random(5)
        outcomes |= run_at(served.llm, jobs, lambda: rng.choice(LENGTHS))
    assert True in replies
    assert_same(outcomes, {name: served.static[name] for name in jobs}, SAMPLED)


def test_grammars_see_the_drafts(speculating: Speculating) -> None:
    check_grammars(speculating)


# ---------------------------------------------------------------- mistakes

MISTAKES: dict[str, tuple[Callable[[Speculating], None], Mistake]] = {
    "drafts of length 0 are looked for": (
        check_no_searches,
        Mistake(
            f"{drafts.__name__}:_asks_for_none",
            {'options.get("num_speculative_tokens") == 0': "False"},
        ),
    ),
    "a switch carries drafts": (
        check_switches,
        Mistake(
            "pat_vllm.scheduler.switch:_rewind",
            {"request.spec_token_ids = []": "pass"},
            in_workers=False,
        ),
    ),
    "a grammar sees older drafts": (
        check_grammars,
        Mistake(
            "pat_vllm.scheduler.replica:Replica.finish",
            {
                "self._drafts = drafts": "self._drafts = getattr(self, 'older', None); "
                "self.older = drafts"
            },
            in_workers=False,
        ),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name: str, speculating: Speculating) -> None:
    check, mistake = MISTAKES[name]
    if name == "a grammar sees older drafts" and not speculating.asynchronous:
        pytest.skip("only asynchronous scheduling has it")
    with made(speculating.llm, mistake), pytest.raises(AssertionError):
        check(speculating)

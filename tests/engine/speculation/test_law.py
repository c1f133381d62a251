"""Sampled responses follow the law of the model, whatever is drafted and wherever it is verified.

An engine of two ranks draws responses to one prompt from a model with 16 tokens, batch by batch.
In the middle of each batch the layout and the draft length change. Of each position of the
responses, `tests.engine.speculation.law` tests the tokens against their exact probabilities given
the tokens before them, and whether requests are independent that must not draw the same random
numbers. The engine is kept in step, so the same seeds give the same responses in each run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import pat_vllm
from pat_vllm.drafts.corpus import BETWEEN_ROWS, Row
from pat_vllm.scheduler.draft_rows import DraftRows
from tests.engine.specs import LAW
from tests.engine.speculation.law import (
    NAMINGS,
    Draws,
    Sampling,
    by_likelihood,
    chi_square,
    independence,
    teacher_forced,
)
from tests.engine.speculation.steps import counted
from tests.support.engines import scheduler_of
from tests.support.models import phrase, random_model

pytestmark = [pytest.mark.engine(LAW), pytest.mark.usefixtures("in_step")]

PROMPT = phrase("vocab16", 28)
LENGTH = 8
"""Tokens of a response. The last positions are in another KV block than the prompt."""
BATCH = 500
REQUESTS = (
    Sampling(),
    Sampling(temperature=1.5),
    Sampling(temperature=2.0, top_k=6),
    Sampling(),
)
"""How the requests of a batch draw, four at a time. Those of the last two have seeds."""
SEEDED = (2, 3)
PROBABLE = 1e-3


@dataclass(frozen=True)
class Script:
    """What happens in a batch: layout and draft length at first, and from step `at` on."""

    tp: int
    length: int
    then_tp: int
    then_length: int
    at: int = 2


SCRIPTS = (Script(2, 4, 1, 2), Script(1, 4, 2, 1), Script(2, 2, 1, 4), Script(1, 1, 2, 4))


@pytest.fixture
def in_step(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine step is a step of each replica, whichever is the faster."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    finished = functools.partial(executor.finished, wait_for_all=True)
    monkeypatch.setattr(executor, "finished", finished)


# -------------------------------------------------------------------- the law


@dataclass
class Sample:
    """What batches have drawn.

    Attributes:
        tokens: of each response, in the order of the requests.
        replicas: pairs of requests that would draw the same random numbers if replicas did.
        batches: the same for two batches.
    """

    tokens: list[list[int]] = field(default_factory=list)
    replicas: list[tuple[int, int]] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)


def draw(llm: Any, batches: int) -> Sample:
    """Responses of some batches, which go through `SCRIPTS` in turn."""
    scheduler_of(llm).controller.switch_id = 1_000  # seeds the requests that have no seed
    sample = Sample()
    unseeded = [i for i in range(BATCH) if kind_of(i) not in SEEDED]
    for number in range(batches):
        first = number * BATCH
        params = [parameters(i, seed=first + i) for i in range(BATCH)]
        replicas = run(llm, SCRIPTS[number % len(SCRIPTS)], params, sample.tokens)
        if len(replicas) == 2:
            rows = zip(*replicas, strict=False)
            same = [row for row in rows if set(row) <= set(unseeded)]
            assert len(same) > BATCH / 10
            sample.replicas += [(first + own, first + other) for own, other in same]
        if number >= 2:
            sample.batches += [(first + i, first + i - 2 * BATCH) for i in unseeded]
    return sample


def kind_of(request: int) -> int:
    """Which of `REQUESTS` a request of a batch is."""
    return request // 4 % len(REQUESTS)


def parameters(request: int, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = kind_of(request)
    return SamplingParams(
        temperature=REQUESTS[kind].temperature,
        top_k=REQUESTS[kind].top_k,
        seed=seed if kind in SEEDED else None,
        max_tokens=LENGTH,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def run(
    llm: Any, script: Script, params: Sequence[Any], tokens: list[list[int]]
) -> list[list[int]]:
    """Responses of one batch, added to `tokens`. Returns the requests by replica."""
    assert pat_vllm.switch(llm, tp=3 - script.tp)
    assert pat_vllm.switch(llm, tp=script.tp)  # seeds what has no seed
    names = [
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": PROMPT}, sampling)
        for i, sampling in enumerate(params)
    ]
    number = {name: i for i, name in enumerate(names)}
    replicas = [
        [number[request.request_id] for request in replica.scheduler.waiting]
        for replica in scheduler_of(llm).replica_set.replicas
    ]
    responses: dict[str, list[int]] = {}
    step = 0
    pat_vllm.speculate(llm, script.length)
    while llm.llm_engine.has_unfinished_requests():
        if step == script.at:
            assert pat_vllm.switch(llm, tp=script.then_tp)
            pat_vllm.speculate(llm, script.then_length)
        for output in llm.llm_engine.step():
            responses[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        assert step < 100, "the engine makes no progress"
    tokens += (responses[str(i)] for i in range(len(params)))
    return replicas


def check(sample: Sample) -> None:
    """The responses are drawn from the model's law, and no two with the same random numbers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(random_model("vocab16"))
    tokens = np.array(sample.tokens)
    assert tokens.shape == (len(sample.tokens), LENGTH)
    logits = teacher_forced(model, PROMPT, tokens)
    kinds = np.array([kind_of(i % BATCH) for i in range(len(tokens))])
    laws = np.empty_like(logits)
    for kind, sampling in enumerate(REQUESTS):
        laws[kinds == kind] = sampling.law(logits[kinds == kind])
    draws = Draws(tokens, laws)
    assert laws[np.arange(len(tokens))[:, None], np.arange(LENGTH), tokens].all(), "ruled out"
    probable = {
        f"{name}, position {position}": chi_square(*naming(draws, position))
        for name, naming in NAMINGS.items()
        for position in range(name == "first token", LENGTH)
    }
    for name, pairs in {"replicas": sample.replicas, "batches": sample.batches}.items():
        for position in range(LENGTH):
            probable[f"{name}, position {position}"] = independence(draws, position, pairs)
    assert min(probable.values()) > PROBABLE, probable


@pytest.mark.parametrize("batches", [8])
def test_the_law_holds_across_switches_and_changes_of_the_draft_length(
    llm: Any, batches: int
) -> None:
    began, before = len(pat_vllm.report(llm).switches), counted(llm)
    sample = draw(llm, batches)
    drafted, accepted = (now - then for now, then in zip(counted(llm), before, strict=True))
    assert 0.25 < accepted / drafted < 0.7
    busy = [switch for switch in pat_vllm.report(llm).switches[began:] if switch.num_seqs]
    assert len(busy) == batches
    assert min(switch.migrated for switch in busy) > BATCH / 2
    check(sample)


# -------------------------------------------------------------------- earlier responses


def third_epoch(llm: Any, monkeypatch: pytest.MonkeyPatch, own: bool) -> list[float]:
    """How probable the tokens are that requests draw whose seeds and prompt come a third time.

    Args:
        own: give each request the response that it gave the time before, against the rule.

    Returns:
        By position.
    """
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    third: list[list[int]] = []
    said: list[list[int]] = []
    unused = itertools.count(1 << 40)
    add = DraftRows.add

    def add_and_look(rows: DraftRows, request: Any) -> None:
        add(rows, request)
        assert request.request_id not in rows.repeated
        if own and said:
            number = int(request.request_id.partition("-")[0])
            tokens = np.array([BETWEEN_ROWS, *PROMPT, *said[number]], np.int32)
            rows._give(request.request_id, (Row(next(unused), tokens),))

    monkeypatch.setattr(DraftRows, "add", add_and_look)
    for first in range(0, 4 * BATCH, BATCH):
        params = [
            SamplingParams(seed=first + i, max_tokens=LENGTH, ignore_eos=True) for i in range(BATCH)
        ]
        said = []
        for length in (0, 4, 4):
            responses: list[list[int]] = []
            run(llm, Script(1, length, 1, length), params, responses)
            said = responses
        third += said
    model = AutoModelForCausalLM.from_pretrained(random_model("vocab16"))
    tokens = np.array(third)
    laws = Sampling().law(teacher_forced(model, PROMPT, tokens))
    return [chi_square(*by_likelihood(Draws(tokens, laws), position)) for position in range(LENGTH)]


def test_a_request_with_a_seed_sees_no_earlier_response(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made with the same random numbers, and the law would be another."""
    assert min(third_epoch(llm, monkeypatch, own=False)) > PROBABLE
    assert min(third_epoch(llm, monkeypatch, own=True)) < 1e-9


# -------------------------------------------------------------------- what seeds promise

SEEDS = 12


def seeded(llm: Any, script: Script, others: int = 0) -> list[list[int]]:
    """Responses of requests with seeds, beside some without."""
    from vllm import SamplingParams

    params = [
        SamplingParams(seed=i, max_tokens=30, ignore_eos=True, temperature=1.5)
        for i in range(SEEDS)
    ]
    params += [SamplingParams(max_tokens=30, ignore_eos=True)] * others
    responses: list[list[int]] = []
    run(llm, script, params, responses)
    return responses[:SEEDS]


@pytest.mark.parametrize("length", [0, 4])
def test_one_draft_length_gives_one_response(llm: Any, length: int) -> None:
    """Of a request with a seed, in whatever layout, and beside whichever others."""
    responses = seeded(llm, Script(1, length, 1, length))
    assert len({tuple(response) for response in responses}) == SEEDS
    assert seeded(llm, Script(2, length, 2, length), others=5) == responses
    if length == 0:  # without drafts a switch changes no response
        assert seeded(llm, Script(1, 0, 2, 0, at=5)) == responses


def test_the_same_changes_give_the_same_response(llm: Any) -> None:
    """Verification takes random numbers. Requests with drafts go on with others otherwise."""
    script = Script(1, 4, 2, 2, at=4)
    responses = seeded(llm, script)
    assert seeded(llm, script, others=5) == responses
    for other in (Script(1, 4, 1, 2, at=4), Script(1, 4, 2, 2, at=5), Script(1, 2, 2, 2, at=4)):
        assert seeded(llm, other) != responses

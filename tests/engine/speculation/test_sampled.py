"""What is drawn at random with speculation: ranks agree, and what a seed promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import DRAFTS
from tests.engine.speculation.batch import MODEL, without_drafts
from tests.engine.speculation.steps import acceptance, watched
from tests.engine.speculation.test_features import outcomes_of
from tests.engine.test_features import add, drive
from tests.support.engines import Job, Outcome
from tests.support.models import phrase
from tests.support.pool import go_home
from tests.support.same import assert_teacher_forced
from tests.vllm.scheduler.protocol import MOST

pytestmark = pytest.mark.engine(DRAFTS)

PENALTIES = {"presence_penalty": 0.4, "frequency_penalty": 0.2, "repetition_penalty": 1.1}


def drawn(seed: int | None = None, **sampling: Any) -> dict[str, Job]:
    """Requests that draw, in the model's phrase."""
    common = {"temperature": 0.8, "max_tokens": 40, "logprobs": 0, "ignore_eos": True, **sampling}
    return {
        f"r{i}": Job(
            phrase(MODEL, 40, start=i),
            common if seed is None else common | {"seed": seed + i},
        )
        for i in range(4)
    }


def through(
    llm: Any,
    jobs: Mapping[str, Job],
    switches: Mapping[int, int],
    lengths: Mapping[int, int],
    tp: int = 1,
) -> dict[str, Outcome]:
    """Outcomes, begun at a tp, with switches and draft lengths by the number of the engine's step.

    With one replica that is its step, too.
    """
    go_home(llm)
    assert pat_vllm.switch(llm, tp=tp)

    def at_step(step: int) -> None:
        if step in lengths:
            pat_vllm.speculate(llm, lengths[step])

    add(llm, jobs)
    return outcomes_of(
        {name: outputs[-1] for name, outputs in drive(llm, switches, at_step).items()}
    )


def texts(outcomes: Mapping[str, Outcome]) -> list[list[int]]:
    return [outcomes[name].token_ids for name in sorted(outcomes)]


@pytest.mark.parametrize("sampling", [{}, {"top_k": 20, "top_p": 0.9}, PENALTIES], ids=str)
def test_a_seed_with_the_same_drafts_gives_the_same(llm: Any, sampling: Any) -> None:
    """The same draft lengths and switches at the same tokens; and the model's own probabilities."""
    way: dict[str, Any] = {"switches": {10: 1}, "lengths": {1: MOST, 5: 2}, "tp": 2}
    with watched() as watch, acceptance(llm, 0.1):
        first, again = (through(llm, drawn(1, **sampling), **way) for _ in range(2))
    assert texts(first) == texts(again)
    assert watch.drafts > 30
    assert len({tuple(text) for text in texts(first)}) == 4
    other_seed = through(llm, drawn(100, **sampling), **way)
    assert texts(other_seed) != texts(first)
    go_home(llm)
    assert_teacher_forced(llm, drawn(), first)


def test_a_seed_without_drafts_gives_what_it_does_without_speculation(llm: Any) -> None:
    """At draft length 0 the random numbers are those of an engine that does not speculate."""
    expected = without_drafts(drawn(1))
    for switches in ({}, {6: 2, 14: 1}):
        assert texts(through(llm, drawn(1), switches, {1: 0})) == texts(expected)


def test_several_samples(llm: Any) -> None:
    """n=3 gives three texts, also with drafts and across switches."""
    pat_vllm.speculate(llm, MOST)
    add(llm, {"n": drawn(6, n=3)["r0"]})
    outputs = drive(llm, {5: 2, 9: 1})["n"][-1].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert {len(output.token_ids) for output in outputs} == {40}

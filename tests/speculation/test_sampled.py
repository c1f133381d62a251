"""What is drawn at random with speculation: ranks agree, and what a seed promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import pat_vllm
from tests.engines import Job, Outcome, run, teacher_forced
from tests.models import phrase
from tests.speculation.batch import MODEL, leave_clean, stock
from tests.speculation.steps import MOST, acceptance, watched
from tests.test_features import Job as Sampled
from tests.test_features import add, drive
from tests.test_switch import TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("clean")]

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
    leave_clean(llm)
    assert pat_vllm.switch(llm, tp=tp)

    def at_step(step: int) -> None:
        if step in lengths:
            pat_vllm.speculate(llm, lengths[step])

    add(llm, {name: Sampled(job.prompt, job.sampling) for name, job in jobs.items()})
    found = {}
    for name, outputs in drive(llm, switches, at_step).items():
        found[name] = Outcome()
        found[name].take(outputs[-1], piece=False)
    return found


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
    jobs = drawn()
    with stock() as static:
        given = {name: (jobs[name].prompt, one.token_ids) for name, one in first.items()}
        for name, scores in teacher_forced(static, given).items():
            assert first[name].logprobs == pytest.approx(scores, abs=TOLERANCE), name


def test_a_seed_without_drafts_gives_what_it_does_without_speculation(llm: Any) -> None:
    """At draft length 0 the random numbers are those of an engine that does not speculate."""
    with stock() as static:
        expected = run(static, drawn(1))
    for switches in ({}, {6: 2, 14: 1}):
        assert texts(through(llm, drawn(1), switches, {1: 0})) == texts(expected)


def test_several_samples(llm: Any) -> None:
    """n=3 gives three texts, also with drafts and across switches."""
    leave_clean(llm)
    pat_vllm.speculate(llm, MOST)
    job = drawn(6, n=3)["r0"]
    add(llm, {"n": Sampled(job.prompt, job.sampling)})
    outputs = drive(llm, {5: 2, 9: 1})["n"][-1].outputs
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) == 3
    assert {len(output.token_ids) for output in outputs} == {40}

"""Which of two sources drafts for a request: that of which more is accepted."""

from __future__ import annotations

import torch

from pat_vllm.worker.drafters.sources import DraftSources

LONGEST = 4
CPU = torch.device("cpu")


def steps(
    sources: DraftSources, gives: dict[int, tuple[int, int]], count: int, match: int = 9
) -> list[list[bool]]:
    """Steps of requests by their state; each has so many drafts accepted by source 0 and 1."""
    states, taken = torch.tensor([*gives]), []
    matches = torch.full((len(gives),), match)
    for _ in range(count):
        last = sources.source[states].tolist()
        accepted = torch.tensor([each[at] for each, at in zip(gives.values(), last, strict=True)])
        chosen = sources.choose(states, matches, 1 + accepted, LONGEST - accepted)
        taken.append(chosen.tolist())
    return taken


def test_the_better_one_is_found_for_each_request() -> None:
    sources = DraftSources(8, LONGEST, CPU)
    taken = steps(sources, {5: (1, 3), 2: (3, 1), 0: (0, 0)}, 200)
    text, weights = ([step[i] for step in taken[20:]] for i in (0, 1))
    assert sum(text) > 0.9 * len(text) and sum(weights) < 0.2 * len(weights)
    assert any(weights[-60:]), "the other one is tried again"


def test_without_a_match_text_does_not_draft() -> None:
    sources = DraftSources(2, LONGEST, CPU)
    assert not any(taken for step in steps(sources, {1: (0, 4)}, 5, match=0) for taken in step)


def test_a_step_that_verified_nothing_says_nothing() -> None:
    sources = DraftSources(2, LONGEST, CPU)
    before = sources.accepted.clone()
    # A part of a prompt, a prompt's end, a step without drafts.
    for sampled in (0, 1):
        states, none = torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int64)
        sources.choose(states, none, torch.full((2,), sampled), none)
    assert sources.accepted.equal(before)


def test_a_state_begins_anew_with_another_request() -> None:
    sources = DraftSources(4, LONGEST, CPU)
    assert sources.begin(["a", "b"], [2, 0]) == [2, 0]
    steps(sources, {2: (0, 0), 0: (0, 0)}, 9)
    learnt = sources.accepted.clone()
    assert sources.begin(["b", "c"], [0, 2]) == [2]
    sources.reset(torch.tensor([2]))
    assert sources.accepted[2].equal(sources.accepted[3]) and sources.accepted[0].equal(learnt[0])
    sources.forget()
    assert sources.begin(["b"], [0]) == [0]

"""The policy that predicts chooses draft lengths, by layout and by number of requests."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.state import LiveState
from pat_vllm.profile import StepShape
from tests.support.modelled_profile import modelled_profile
from tests.unit.predictor.examples import live_requests

LENGTHS = (0, 1, 2, 4)
BOUND = 4096


class Driven:
    """A policy, by modelled step times, with live requests that decode in the base layout."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, requests: int = 8) -> None:
        profile = modelled_profile(
            "llama-3.1-8b", "H100", 4, draft_lengths=LENGTHS[1:], drafting=1e-3
        )
        self.policy = AdaptivePolicy(profile, bound=BOUND, draft_lengths=lengths, timer=lambda: 0.0)
        self.requests, self.now = requests, 0.0
        self.layout: Layout = self.policy.default_layout
        for _ in range(requests):
            self.policy.arrived(0.0)

    def steps(self, count: int, k: int, accepted: int | None) -> None:
        """Steps of a replica with all requests; None: no draft was found for any."""
        batch = self.requests
        hits = 0 if accepted is None else batch
        shape = StepShape(batch, 500 * batch, 500, drafts=hits * k, k=k)
        for _ in range(count):
            self.now += 0.01
            self.policy.stepped(self.now, self.layout, shape, 0.01)
            self.policy.verified(self.now, k, batch, np.full(hits, accepted or 0))

    def plan(self) -> dict[int, int]:
        """`table` after a plan."""
        self.now += 100.0
        live = live_requests([100] * self.requests, 400, BOUND)
        self.policy.choose(LiveState(self.now, self.layout, self.requests, 10.0, lambda: live))
        return self.table()

    def table(self) -> dict[int, int]:
        """The draft length of the layout by requests of a replica."""
        schedule = self.policy.drafts.get(self.layout, ())
        return {batch: k for first, last, k in schedule for batch in range(first, last + 1)}


@pytest.mark.parametrize("over", [False, True])
def test_draft_lengths_follow_what_is_accepted(over: bool) -> None:
    """A batch begins as one like the last is planned: the first one without drafts, none with the
    lengths of the last one's tail."""
    driven = Driven()
    assert {*driven.table().values()} == {0}
    driven.steps(70, 4, 4)
    planned = driven.plan()
    assert planned[1] == planned[2] == 4, "drafts that are all accepted"
    driven.steps(3000, 4, 0)
    assert driven.plan()[1] == 0, "drafts that are never accepted"
    driven.policy.weights_changed()
    if over:
        driven.policy.batch_over(driven.now)
    else:
        driven.plan()
    assert driven.table()[1] > 0, "with other weights they may be"


def test_an_engine_that_leaves_lengths_to_its_configuration() -> None:
    driven = Driven((0,))
    driven.steps(70, 4, 4)
    assert driven.plan() == {} == driven.policy.drafts


def test_speeds_are_seen_in_steps_of_one_draft_length() -> None:
    """Else steps without drafts would make all requests seem slow."""
    driven, looked = Driven(), []
    driven.policy._speeds.observe = lambda live, expected: looked.append(expected)  # type: ignore[method-assign]
    for steps in ([(20, 2)], [(20, 0)], [(5, 0), (15, 2)], [(1, 0), (19, 2)], []):
        for count, k in steps:
            driven.steps(count, k, accepted=min(k, 1))
        driven.plan()
    assert [expected > 0 for expected in looked] == [True, False, False, True, False]


def test_both_kinds_of_requests_of_a_step_are_learnt_from() -> None:
    """They are told of one after the other, however long learning from the first takes."""
    ticks = itertools.count()
    profile = modelled_profile("llama-3.1-8b", "H100", 4, draft_lengths=LENGTHS[1:], drafting=1e-3)
    policy = AdaptivePolicy(
        profile, bound=BOUND, draft_lengths=LENGTHS, timer=lambda: 1e-4 * next(ticks)
    )
    assert policy._acceptance is not None
    for step in range(20):
        policy.verified(float(step), 4, 4, np.full(4, 4), True)
        policy.verified(float(step), 4, 4, np.full(0, 0), False)
    assert policy._acceptance.of_repeated.expected().tokens[-1] > 3
    assert policy._acceptance.of_new.expected().tokens[-1] < 2

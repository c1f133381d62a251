"""What drafts are worth, against made-up and real repetition."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.predictor.acceptance import PLAIN, Acceptance, Drafting
from pat_vllm.predictor.state import Bools, Ints

LENGTHS = (0, 1, 2, 4, 7)
NONE = np.zeros(0, np.int64)
STRETCH = 40
"""Mean tokens of a stretch in which a request repeats itself."""


class Repeating:
    """Requests that repeat themselves in stretches, in which each draft is accepted or not.

    Args:
        share: of the tokens that lie in such stretches.
        accepted: probability that a draft within one is accepted.
    """

    def __init__(self, requests: int, share: float, accepted: float, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.share, self.accepted = share, accepted
        # Tokens that are left of each request's stretch; 0 outside of one.
        self.left = self.stretches(requests) * (self.random.random(requests) < share)

    def stretches(self, count: int) -> Ints:
        return self.random.geometric(1 / STRETCH, count)

    def step(self, length: int) -> tuple[Bools, Ints]:
        """Which requests have drafts in a step, and how many of each are accepted."""
        count = len(self.left)
        hit = self.left > 0
        run = self.random.geometric(1 - self.accepted, count) - 1
        accepted = np.where(hit, np.minimum(np.minimum(run, length), self.left - 1), 0)
        begins = self.random.random(count) < self.share / (1 - self.share) / STRETCH
        self.left = np.where(hit, self.left - 1 - accepted, begins * self.stretches(count))
        return hit, accepted

    def tokens(self, length: int, steps: int = 400) -> tuple[float, float]:
        """Tokens of a request per step, and its drafts, in the mean of many steps."""
        many = [self.step(length) for _ in range(steps)]
        drafts = float(np.mean([length * hit.mean() for hit, _ in many]))
        return 1 + float(np.mean([accepted for _, accepted in many])), drafts


def watch(model: Acceptance, world: Repeating, length: int, steps: int) -> None:
    for _ in range(steps):
        hit, accepted = world.step(length)
        model.observe(length, len(hit), accepted[hit] if length else NONE)


@st.composite
def watched(draw: st.DrawFn) -> Acceptance:
    model = Acceptance(draw(st.sampled_from([(0,), (0, 1), (0, 4), LENGTHS])))
    longest = int(model.lengths[-1])
    counts = st.lists(st.integers(0, 7), max_size=12)
    for accepted in draw(st.lists(counts, max_size=4)) if longest else ():
        length = draw(st.integers(max(accepted, default=0), 7))
        if 0 < length <= longest:
            model.observe(length, len(accepted) + draw(st.integers(0, 9)), np.array(accepted, int))
    return model


def values_of(drafting: Drafting) -> list[list[float]]:
    return [getattr(drafting, name).tolist() for name in Drafting.__dataclass_fields__]


@given(watched())
def test_expectations_make_sense_and_are_kept(model: Acceptance) -> None:
    drafting = model.expected()
    lengths, tokens = drafting.lengths, drafting.tokens
    assert lengths is model.lengths
    assert tokens[0] == drafting.hoped[0] == 1 and drafting.drafts[0] == 0
    assert (np.diff(tokens) >= 0).all() and (tokens <= 1 + lengths).all()
    assert (drafting.hoped > tokens)[lengths > 0].all() and (drafting.hoped <= 1 + lengths).all()
    assert (drafting.drafts <= lengths).all()
    assert (tokens - 1 <= drafting.drafts + 1e-12).all(), "what is accepted was proposed"
    again = Acceptance.from_json(json.loads(json.dumps(model.to_json())), lengths.tolist())
    assert values_of(again.expected()) == values_of(drafting)


def test_without_drafts_nothing_is_expected() -> None:
    assert values_of(Acceptance((0,)).expected()) == values_of(PLAIN)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 30))
def test_what_was_seen_is_expected_again(accepted: list[int], misses: int) -> None:
    model = Acceptance(LENGTHS)
    requests = len(accepted) + misses
    for _ in range(2000):
        model.observe(4, requests, np.array(accepted))
    drafting = model.expected()
    assert drafting.tokens[3] == pytest.approx(1 + sum(accepted) / requests, rel=0.03)
    assert drafting.drafts[3] == pytest.approx(4 * len(accepted) / requests, rel=0.08, abs=0.02)


@pytest.mark.parametrize(("share", "accepted"), [(0.3, 0.8), (0.5, 0.9), (0.02, 0.5)])
def test_it_comes_to_the_truth_for_lengths_that_were_never_tried(
    share: float, accepted: float
) -> None:
    model = Acceptance(LENGTHS)
    watch(model, Repeating(64, share, accepted), 7, 100)
    drafting = model.expected()
    for at, length in enumerate(LENGTHS):
        tokens, drafts = Repeating(64, share, accepted, seed=1).tokens(length, 600)
        assert drafting.tokens[at] == pytest.approx(tokens, rel=0.06)
        assert drafting.drafts[at] == pytest.approx(drafts, rel=0.15, abs=0.03 * length)
        assert drafting.hoped[at] == pytest.approx(drafting.tokens[at], rel=0.1)


def test_a_change_is_followed_quickly_with_new_weights_and_in_time_without() -> None:
    model = Acceptance(LENGTHS)
    watch(model, Repeating(64, 0.7, 0.8), 4, 500)
    assert model.expected().tokens[3] > 1.7
    model.weights_changed()
    watch(model, Repeating(64, 0.3, 0.3, seed=2), 4, 20)
    tokens, _ = Repeating(256, 0.3, 0.3).tokens(4)
    assert model.expected().tokens[3] == pytest.approx(tokens, rel=0.1)

    model = Acceptance(LENGTHS)
    watch(model, Repeating(16, 0.7, 0.8), 4, 500)
    watch(model, Repeating(16, 0.1, 0.3, seed=2), 4, 3000)
    tokens, _ = Repeating(256, 0.1, 0.3).tokens(4)
    assert model.expected().tokens[3] == pytest.approx(tokens, rel=0.07)


def test_the_version_grows_with_changes_and_hardly_without_them() -> None:
    model = Acceptance(LENGTHS)
    watch(model, Repeating(64, 0.7, 0.8), 4, 100)
    before = model.version
    assert before >= 1
    watch(model, Repeating(64, 0.7, 0.8, seed=1), 4, 1000)
    assert model.version <= before + 10
    before = model.version
    model.weights_changed()
    assert model.version == before + 1
    watch(model, Repeating(64, 0.1, 0.1), 4, 20)
    assert model.version > before + 1


# Choosing


def regret(
    requests: int,
    worlds: Sequence[tuple[float, float]],
    steps: int,
    drafting: float,
) -> tuple[float, float]:
    """Time per token relative to the best fixed length, and the share of steps with drafts.

    The length is chosen again whenever the model has another version.

    Args:
        worlds: share and acceptance, one after the other without a word; what is returned is of
            the second half of the last one, or of all steps where there is no other.
        steps: in each world.
        drafting: seconds to look for drafts. Decoding takes 1, verifying a draft a hundredth.
    """

    def step_seconds(drafts: Any, length: Any) -> Any:
        return 1 + 0.01 * drafts * requests + drafting * (length > 0)

    model, version, length = Acceptance(LENGTHS), -1, 0
    for number, (share, accepted) in enumerate(worlds):
        world = Repeating(requests, share, accepted, seed=3 * number)
        time = made = drafted = 0.0
        for step in range(steps):
            if number and step == steps // 2:
                time = made = drafted = 0.0
            if model.version != version:
                version, expected = model.version, model.expected()
                seconds = step_seconds(expected.drafts, expected.lengths)
                length = LENGTHS[int((seconds / expected.hoped).argmin())]
            hit, taken = world.step(length)
            model.observe(length, requests, taken[hit] if length else NONE)
            time += step_seconds(length * hit.mean(), length)
            made += 1 + taken.mean()
            drafted += length > 0
    best = math.inf
    for fixed in LENGTHS:
        tokens, drafts = Repeating(64, share, accepted, seed=5).tokens(fixed, 300)
        best = min(best, step_seconds(drafts, fixed) / tokens)
    return time / made / best - 1, drafted / (steps / 2 if number else steps)


@pytest.mark.parametrize(
    ("requests", "share", "accepted"), [(1, 0.5, 0.03), (8, 0.02, 0.5), (64, 0.5, 0.03)]
)
def test_useless_drafts_are_given_up(requests: int, share: float, accepted: float) -> None:
    lost, drafted = regret(requests, [(share, accepted)], 4000, drafting=0.1)
    assert lost < 0.02
    assert drafted < 0.2


@pytest.mark.parametrize(
    ("requests", "share", "accepted", "steps"),
    [(1, 0.8, 0.6, 4000), (8, 0.5, 0.4, 4000), (64, 0.3, 0.8, 1000)],
)
def test_the_length_is_nearly_the_best(
    requests: int, share: float, accepted: float, steps: int
) -> None:
    lost, _ = regret(requests, [(share, accepted)], steps, drafting=0.02)
    assert lost < 0.03


def test_drafts_that_were_given_up_are_tried_again() -> None:
    lost, drafted = regret(8, [(0.5, 0.01), (0.8, 0.8)], 4000, drafting=0.1)
    assert drafted > 0.9
    assert lost < 0.03


# Files


def test_a_model_for_other_lengths_takes_what_it_can() -> None:
    model = Acceptance((0, 4))
    watch(model, Repeating(64, 0.6, 0.7), 4, 100)
    again = Acceptance.from_json(model.to_json(), LENGTHS)
    assert again.expected().tokens[3] == model.expected().tokens[1]
    fewer = Acceptance.from_json(model.to_json(), (0, 1))
    assert fewer.expected().tokens[1] == again.expected().tokens[1]


@pytest.mark.parametrize(
    ("tried", "succeeded"),
    [([1.0], None), ([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([math.inf], [1.0]), (["many"], [1.0])],
)
def test_what_is_no_model_is_refused(tried: object, succeeded: object) -> None:
    for data in (None, {"format": 0}, {"format": 1, "tried": tried, "succeeded": succeeded}):
        with pytest.raises(ValueError):
            Acceptance.from_json(data, LENGTHS)

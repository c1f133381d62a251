"""What drafts are worth, against made-up and real repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.predictor.acceptance import PLAIN, Acceptance, AcceptanceByPrompt, DraftYield
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
        self.left = self.intervals(requests) * (self.random.random(requests) < share)

    def intervals(self, count: int) -> Ints:
        return self.random.geometric(1 / STRETCH, count)

    def step(self, length: int) -> tuple[Bools, Ints]:
        """Which requests have drafts in a step, and how many of each are accepted."""
        count = len(self.left)
        hit = self.left > 0
        run = self.random.geometric(1 - self.accepted, count) - 1
        accepted = np.where(hit, np.minimum(np.minimum(run, length), self.left - 1), 0)
        begins = self.random.random(count) < self.share / (1 - self.share) / STRETCH
        self.left = np.where(hit, self.left - 1 - accepted, begins * self.intervals(count))
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


def values_of(drafting: DraftYield) -> list[list[float]]:
    return [getattr(drafting, name).tolist() for name in DraftYield.__dataclass_fields__]


def taken(model: Acceptance, lengths: Sequence[int]) -> Acceptance:
    """A model of these lengths that takes what the other has learnt."""
    other = Acceptance(lengths)
    other.take(model.counts)
    return other


@given(watched())
def test_expectations_make_sense_and_are_kept(model: Acceptance) -> None:
    drafting = model.expected()
    lengths, tokens = drafting.lengths, drafting.tokens
    assert lengths is model.lengths
    assert tokens[0] == 1 and drafting.drafts[0] == 0
    assert (np.diff(tokens) >= 0).all() and (tokens <= 1 + lengths).all()
    assert (drafting.drafts <= lengths).all()
    assert (tokens - 1 <= drafting.drafts + 1e-12).all(), "what is accepted was proposed"
    assert values_of(taken(model, lengths.tolist()).expected()) == values_of(drafting)


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


def test_drafts_that_are_shorter_than_asked_for_cost_less() -> None:
    """A drafter gives no more than its match has, say. What is accepted is known as before."""
    random = np.random.default_rng(0)
    short, whole = Acceptance(LENGTHS), Acceptance(LENGTHS)
    for _ in range(200):
        drafted = random.integers(1, 8, 40)
        accepted = np.minimum(random.geometric(0.3, 40) - 1, drafted)
        short.observe(7, 64, accepted, drafted)
        whole.observe(7, 64, accepted)
    assert short.expected().tokens.tolist() == whole.expected().tokens.tolist()
    for at, length in enumerate(LENGTHS[1:], start=1):
        mean = float(np.minimum(np.arange(1, 8), length).mean())
        ratio = short.expected().drafts[at] / whole.expected().drafts[at]
        assert ratio == pytest.approx(mean / length, rel=0.02)
    # Of longer drafts than were ever asked for, no more is expected than of these.
    few = Acceptance(LENGTHS)
    for _ in range(200):
        few.observe(2, 64, np.ones(40, np.int64), np.ones(40, np.int64))
    assert (few.expected().drafts[1:] <= 1.3 * few.expected().drafts[1]).all()


def test_lengths_that_other_models_lack_follow_the_ones_that_they_have() -> None:
    model = Acceptance((0, 4))
    watch(model, Repeating(64, 0.6, 0.7), 4, 100)
    assert taken(model, LENGTHS).expected().tokens[3] == model.expected().tokens[1]
    assert values_of(taken(model, (0,)).expected()) == values_of(PLAIN)


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


def regret(requests: int, worlds: Sequence[tuple[float, float]], drafting: float) -> float:
    """By what part a token takes longer than with the best fixed length.

    The length is chosen again whenever the model has another version.

    Args:
        worlds: share and acceptance, one after the other without a word, 4,000 steps each; what is
            returned is of the second half of the last one.
        drafting: seconds to look for drafts. Decoding takes 1, verifying a draft a hundredth.
    """

    def step_seconds(drafts: Any, length: Any) -> Any:
        return 1 + 0.01 * drafts * requests + drafting * (length > 0)

    model, version, length = Acceptance(LENGTHS), -1, 0
    for number, (share, accepted) in enumerate(worlds):
        world = Repeating(requests, share, accepted, seed=3 * number)
        time = generated = 0.0
        for step in range(4000):
            if step == 2000:
                time = generated = 0.0
            if model.version != version:
                version, expected = model.version, model.expected()
                seconds = step_seconds(expected.drafts, expected.lengths)
                length = LENGTHS[int((seconds / expected.tokens).argmin())]
            hit, taken = world.step(length)
            model.observe(length, requests, taken[hit] if length else NONE)
            time += step_seconds(length * hit.mean(), length)
            generated += 1 + taken.mean()
    best = math.inf
    for fixed in LENGTHS:
        tokens, drafts = Repeating(64, share, accepted, seed=5).tokens(fixed, 300)
        best = min(best, step_seconds(drafts, fixed) / tokens)
    return float(time / generated / best - 1)


@pytest.mark.parametrize(
    ("requests", "worlds", "drafting"),
    [
        pytest.param(1, [(0.5, 0.03)], 0.1, id="useless for one request"),
        pytest.param(64, [(0.5, 0.03)], 0.1, id="useless for many"),
        pytest.param(8, [(0.5, 0.4)], 0.02, id="short ones are best"),
        pytest.param(8, [(0.5, 0.01), (0.8, 0.8)], 0.1, id="given up, and tried again"),
    ],
)
def test_the_length_is_nearly_the_best(
    requests: int, worlds: list[tuple[float, float]], drafting: float
) -> None:
    assert regret(requests, worlds, drafting) < 0.025


# ---------------------------------------------------------------- repeated prompts


def repeated_epoch(model: AcceptanceByPrompt, requests: int, repeated: int) -> None:
    for number in range(requests):
        model.arrived(number < repeated)


def test_what_epochs_without_history_taught_does_not_bind_the_next() -> None:
    model = AcceptanceByPrompt(Acceptance(LENGTHS))
    repeated_epoch(model, 64, 0)
    watch(model.of_new, Repeating(64, 0.05, 0.2), 4, 300)
    assert model.expected().tokens[-1] < 1.1
    model.end_of_batch()
    assert model.expected().tokens[-1] < 1.1, "as the batch before"
    repeated_epoch(model, 64, 64)
    assert values_of(model.expected()) == values_of(Acceptance(LENGTHS).expected())
    for _ in range(300):
        model.observe(4, 64, np.full(60, 3), repeated=True)
    assert model.expected().tokens[3] > 3
    assert model.of_new.expected().tokens[3] < 1.1 and model.version[1] > 0


def test_requests_whose_siblings_have_ended_count_as_repeated() -> None:
    model = AcceptanceByPrompt(Acceptance(LENGTHS))
    repeated_epoch(model, 8, 0)
    watch(model.of_repeated, Repeating(64, 0.9, 0.9), 4, 100)
    before = model.expected().tokens[3]
    for _ in range(200):
        model.decoded(6, repeated=True)
        model.decoded(2, repeated=False)
    new, repeated = (part.expected() for part in (model.of_new, model.of_repeated))
    assert model.expected().tokens == pytest.approx(
        0.25 * new.tokens + 0.75 * repeated.tokens, rel=0.02
    )
    assert model.expected().tokens[3] > before
    model.end_of_batch()
    assert model.expected().tokens[3] == before, "the next ones arrive as these did"


def test_a_batch_of_both_is_their_mean() -> None:
    model = AcceptanceByPrompt(Acceptance(LENGTHS))
    watch(model.of_new, Repeating(64, 0.3, 0.5), 4, 100)
    watch(model.of_repeated, Repeating(64, 0.9, 0.9), 4, 100)
    repeated_epoch(model, 40, 10)
    new, repeated = (part.expected() for part in (model.of_new, model.of_repeated))
    assert model.expected().tokens == pytest.approx(0.75 * new.tokens + 0.25 * repeated.tokens)
    assert model.expected().drafts == pytest.approx(0.75 * new.drafts + 0.25 * repeated.drafts)
    speeds = np.array([0.5, 1.0, 2.0])
    assert model.tokens_at(speeds) == pytest.approx(
        0.75 * model.of_new.tokens_at(speeds) + 0.25 * model.of_repeated.tokens_at(speeds)
    )
    for length, tokens in zip(LENGTHS, model.expected().tokens, strict=True):
        assert model.per_step(length) == tokens - 1
    before = model.of_repeated.expected().tokens[3]
    model.weights_changed()
    for _ in range(20):
        model.observe(4, 64, NONE, repeated=True)
    assert model.of_repeated.expected().tokens[3] < before / 2

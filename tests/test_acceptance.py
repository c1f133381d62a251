"""What drafts are worth, against made-up and real repetition."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.predictor.acceptance import PLAIN, Acceptance, Drafting
from tests.support.mutation import mutated

LENGTHS = (0, 1, 2, 4, 7)
NONE = np.zeros(0, np.int64)


class Repeating:
    """Requests that repeat themselves in stretches, in which each draft is accepted or not.

    Args:
        share: of the tokens that lie in such stretches.
        accepted: probability that a draft within one is accepted.
        stretch: mean tokens of one.
    """

    def __init__(self, requests, share, accepted, seed=0, stretch=40):
        self.random = np.random.default_rng(seed)
        self.share, self.accepted, self.stretch = share, accepted, stretch
        # Tokens that are left of each request's stretch; 0 outside of one.
        self.left = self.stretches(requests) * (self.random.random(requests) < share)

    def stretches(self, count):
        return self.random.geometric(1 / self.stretch, count)

    def step(self, length):
        """Which requests have drafts in a step, and how many of each are accepted."""
        count = len(self.left)
        hit = self.left > 0
        run = self.random.geometric(1 - self.accepted, count) - 1
        accepted = np.where(hit, np.minimum(np.minimum(run, length), self.left - 1), 0)
        begins = self.random.random(count) < self.share / (1 - self.share) / self.stretch
        self.left = np.where(hit, self.left - 1 - accepted, begins * self.stretches(count))
        return hit, accepted

    def tokens(self, length, steps=600):
        """Tokens of a request per step, and its drafts, in the mean of many steps."""
        drafts, made = [], []
        for _ in range(steps):
            hit, accepted = self.step(length)
            drafts.append(length * hit.mean())
            made.append(1 + accepted.mean())
        return float(np.mean(made)), float(np.mean(drafts))


def watch(model, world, length, steps):
    for _ in range(steps):
        hit, accepted = world.step(length)
        model.observe(length, len(hit), accepted[hit] if length else NONE)


# What is expected


@st.composite
def watched(draw):
    model = Acceptance(draw(st.sampled_from([(0,), (0, 1), (0, 4), LENGTHS])))
    longest = int(model.lengths[-1])
    counts = st.lists(st.integers(0, 7), max_size=12)
    for accepted in draw(st.lists(counts, max_size=4)) if longest else ():
        length = draw(st.integers(max(accepted, default=0), 7))
        if 0 < length <= longest:
            model.observe(length, len(accepted) + draw(st.integers(0, 9)), np.array(accepted, int))
    return model


@settings(deadline=None)
@given(watched())
def test_expectations_make_sense(model):
    drafting = model.expected()
    assert drafting.lengths is model.lengths
    lengths, tokens = drafting.lengths, drafting.tokens
    assert tokens[0] == drafting.hoped[0] == 1 and drafting.drafts[0] == 0
    assert (np.diff(tokens) >= 0).all() and (tokens <= 1 + lengths).all()
    assert (drafting.hoped >= tokens - 1e-12).all() and (drafting.hoped <= 1 + lengths).all()
    assert (drafting.drafts <= lengths).all()
    assert (tokens - 1 <= drafting.drafts + 1e-12).all(), "what is accepted was proposed"
    again = Acceptance.from_json(json.loads(json.dumps(model.to_json())), lengths.tolist())
    assert all(
        np.array_equal(getattr(again.expected(), name), getattr(drafting, name))
        for name in Drafting.__dataclass_fields__
    )


def test_without_drafts_nothing_is_expected():
    for name in Drafting.__dataclass_fields__:
        assert np.array_equal(getattr(Acceptance((0,)).expected(), name), getattr(PLAIN, name))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=30),
    st.integers(0, 30),
)
def test_what_was_seen_is_expected_again(accepted, misses):
    model = Acceptance(LENGTHS)
    requests = len(accepted) + misses
    for _ in range(2000):
        model.observe(4, requests, np.array(accepted))
    at = LENGTHS.index(4)
    drafting = model.expected()
    assert drafting.tokens[at] == pytest.approx(1 + sum(accepted) / requests, rel=0.03)
    assert drafting.drafts[at] == pytest.approx(4 * len(accepted) / requests, rel=0.08, abs=0.02)


@pytest.mark.parametrize("share, accepted", [(0.3, 0.8), (0.7, 0.5), (0.5, 0.9), (0.02, 0.5)])
def test_it_comes_to_the_truth_for_lengths_that_were_never_tried(share, accepted):
    check_converges(share, accepted)


def check_converges(share, accepted):
    model = Acceptance(LENGTHS)
    watch(model, Repeating(64, share, accepted), 7, 100)
    drafting = model.expected()
    for at, length in enumerate(LENGTHS):
        tokens, drafts = Repeating(64, share, accepted, seed=1).tokens(length)
        assert drafting.tokens[at] == pytest.approx(tokens, rel=0.06)
        assert drafting.drafts[at] == pytest.approx(drafts, rel=0.15, abs=0.03 * length)
        assert drafting.hoped[at] == pytest.approx(drafting.tokens[at], rel=0.1)


def test_text_repeats_itself_as_the_model_takes_it_to():
    """Real text: n-grams in the documentation, as vLLM looks for them."""
    folder = Path(__file__).parent.parent / "docs"
    texts = [re.findall(r"\w+|[^\w\s]", path.read_text()) for path in sorted(folder.glob("*.md"))]
    longest = {length: looked_up(texts, length) for length in LENGTHS[1:]}
    model = Acceptance(LENGTHS)
    model.observe(7, *longest[7])
    drafting = model.expected()
    for at, length in enumerate(LENGTHS[1:], 1):
        steps, accepted = longest[length]
        assert drafting.tokens[at] == pytest.approx(1 + accepted.sum() / steps, rel=0.02)


def looked_up(texts, length):
    """Steps to make texts whose drafts are looked up in them, and the drafts accepted per hit."""
    steps, hits = 0, []
    for text in texts:
        first: dict[tuple[str, ...], int] = {}
        at = noted = 0
        while at < len(text):
            for end in range(noted + 1, at + 1):
                for size in (2, 3, 4):
                    first.setdefault(tuple(text[max(0, end - size) : end]), end)
            noted = at
            starts = (first.get(tuple(text[max(0, at - size) : at]), at) for size in (4, 3, 2))
            start = next((one for one in starts if one < at), None)
            accepted = 0
            if start is not None and at >= 4:
                while (
                    accepted < min(length, at - start)
                    and at + accepted < len(text)
                    and text[start + accepted] == text[at + accepted]
                ):
                    accepted += 1
                hits.append(accepted)
            at += 1 + accepted
            steps += 1
    return steps, np.array(hits)


# Change


def check_new_weights():
    model = Acceptance(LENGTHS)
    watch(model, Repeating(64, 0.7, 0.8), 4, 500)
    assert model.expected().tokens[3] > 1.7
    model.weights_changed()
    watch(model, Repeating(64, 0.3, 0.3, seed=2), 4, 20)
    tokens, _ = Repeating(256, 0.3, 0.3).tokens(4)
    assert model.expected().tokens[3] == pytest.approx(tokens, rel=0.1)


def test_new_weights_are_followed_within_twenty_steps():
    check_new_weights()


def test_a_change_that_nobody_tells_is_followed_in_time():
    model = Acceptance(LENGTHS)
    watch(model, Repeating(16, 0.7, 0.8), 4, 500)
    watch(model, Repeating(16, 0.1, 0.3, seed=2), 4, 3000)
    tokens, _ = Repeating(256, 0.1, 0.3).tokens(4)
    assert model.expected().tokens[3] == pytest.approx(tokens, rel=0.07)


def test_the_version_tells_of_changes_and_is_quiet_without_them():
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


def step_seconds(requests, drafts, length, drafting):
    """Made up: a step of decoding takes 1, and verifying a draft a hundredth."""
    return 1 + 0.01 * drafts * requests + drafting * (length > 0)


def regret(requests, share, accepted, drafting, steps, *, after=None):
    """Time per token relative to the best fixed length, and the share of steps with drafts.

    The length is chosen again whenever the model has another version.

    Args:
        after: what the truth changes to half-way, without a word; regret is then of the last
            quarter.
    """
    model, version, length = Acceptance(LENGTHS), -1, 0
    world = Repeating(requests, share, accepted)
    time = made = drafted = 0.0
    for step in range(steps):
        if after and step == steps // 2:
            share, accepted = after
            world = Repeating(requests, share, accepted, seed=3)
        if after and step == steps * 3 // 4:
            time = made = drafted = 0.0
        if model.version != version:
            version, expected = model.version, model.expected()
            seconds = step_seconds(requests, expected.drafts, expected.lengths, drafting)
            length = LENGTHS[int((seconds / expected.hoped).argmin())]
        hit, taken = world.step(length)
        model.observe(length, requests, taken[hit] if length else NONE)
        time += step_seconds(requests, length * hit.mean(), length, drafting)
        made += 1 + taken.mean()
        drafted += length > 0
    best = math.inf
    for one in LENGTHS:
        tokens, drafts = Repeating(64, share, accepted, seed=5).tokens(one, 300)
        best = min(best, step_seconds(requests, drafts, one, drafting) / tokens)
    return time / made / best - 1, drafted / (steps / 4 if after else steps)


def check_useless_drafts(requests, share, accepted):
    lost, drafted = regret(requests, share, accepted, 0.1, 4000)
    assert lost < 0.02
    assert drafted < 0.2


@pytest.mark.parametrize("requests", [1, 8, 64])
@pytest.mark.parametrize("share, accepted", [(0.02, 0.5), (0.5, 0.03)])
def test_useless_drafts_are_given_up(requests, share, accepted):
    check_useless_drafts(requests, share, accepted)


@pytest.mark.parametrize(
    "requests, share, accepted, steps",
    [
        (1, 0.8, 0.6, 4000),
        (8, 0.3, 0.8, 4000),
        (8, 0.8, 0.6, 4000),
        (8, 0.5, 0.4, 4000),
        (64, 0.3, 0.8, 1000),
        (64, 0.5, 0.4, 1000),
    ],
)
def test_the_length_is_nearly_the_best(requests, share, accepted, steps):
    lost, _ = regret(requests, share, accepted, 0.02, steps)
    assert lost < 0.03


def check_tried_again():
    lost, drafted = regret(8, 0.5, 0.01, 0.1, 8000, after=(0.8, 0.8))
    assert drafted > 0.9
    assert lost < 0.03


def test_drafts_that_were_given_up_are_tried_again():
    check_tried_again()


FADES = "keep = math.exp(-1 / max(memory, _MEMORY_OF_ONE / max(1, requests)))"


@pytest.mark.parametrize(
    "function, changes, check",
    [
        (Acceptance.observe, {FADES: "keep = 1.0"}, check_tried_again),
        (Acceptance.observe, {FADES: "keep = 0.95"}, lambda: check_useless_drafts(1, 0.5, 0.03)),
        (Acceptance.weights_changed, {"keep = ": "keep = 1.0 + 0 * "}, check_new_weights),
        (
            Acceptance._count,
            {"at_least[0] + made": "at_least[0]"},
            lambda: check_converges(0.5, 0.9),
        ),
        (
            Acceptance._tokens,
            {"1 / (1 - shares[0] + shares[0] / per_hit)": "1 + shares[0] * (per_hit - 1)"},
            lambda: check_converges(0.5, 0.9),
        ),
        (Acceptance.expected, {"hits * self": "self"}, lambda: check_converges(0.3, 0.8)),
    ],
)
def test_mistakes_are_seen(function, changes, check):
    with mutated(function, changes), pytest.raises(AssertionError):
        check()


# Files


def test_a_model_for_other_lengths_takes_what_it_can():
    model = Acceptance((0, 4))
    watch(model, Repeating(64, 0.6, 0.7), 4, 100)
    again = Acceptance.from_json(model.to_json(), LENGTHS)
    assert again.expected().tokens[3] == model.expected().tokens[1]
    fewer = Acceptance.from_json(model.to_json(), (0, 1))
    assert fewer.expected().tokens[1] == again.expected().tokens[1]


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"format": 0},
        {"format": 1, "tried": [1.0]},
        {"format": 1, "tried": [1.0], "succeeded": [2.0]},
        {"format": 1, "tried": [1.0, 2.0], "succeeded": [1.0]},
        {"format": 1, "tried": [math.inf], "succeeded": [1.0]},
        {"format": 1, "tried": ["many"], "succeeded": [1.0]},
    ],
)
def test_what_is_no_model_is_refused(data):
    with pytest.raises(ValueError):
        Acceptance.from_json(data, LENGTHS)

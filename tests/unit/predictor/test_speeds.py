"""Requests whose drafts are accepted more, or less, often than the others'."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator.ground_truth import ReplayedGroundTruth
from benchmarks.simulator.shapes import uniform
from benchmarks.simulator.simulate import simulate_batches
from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import Acceptance, DraftYield
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.forecast import forecast
from pat_vllm.predictor.planner import Planner
from pat_vllm.predictor.speeds import Speeds
from pat_vllm.predictor.state import Floats, Ints, LiveRequests
from tests.support.modelled_profile import modelled_profile
from tests.unit.predictor.examples import live_requests

LENGTHS = (0, 1, 2, 4, 7)
ONE = Layout(1, 1)


def looks(speeds: Speeds, each: Floats, steps: int, count: int = 10) -> LiveRequests:
    """The requests after so many looks, `steps` steps apart, in which each accepts `each` drafts
    per step where 1 is expected."""
    for look in range(count):
        done = look * steps
        live = live_requests([50] * len(each), np.round(1 + done * (1 + each)), steps=done)
        speeds.observe(live, 1.0)
    return live


def test_requests_are_alike_until_it_shows_that_they_are_not() -> None:
    speeds = Speeds()
    live = looks(speeds, np.ones(8), 10, 1)
    assert speeds.variance == 0 and (speeds.sample(live, 4) == 1).all()
    live = looks(speeds, np.ones(8), 10)
    assert speeds.variance == 0 and (speeds.sample(live, 4) == 1).all()


def test_a_requests_own_speed_is_found_and_fresh_ones_vary_as_much() -> None:
    each = np.linspace(0.4, 1.6, 16)
    speeds = Speeds()
    live = looks(speeds, each, 1000)
    assert speeds.sample(live, 8).mean(axis=1) == pytest.approx(each, abs=0.05)
    assert speeds.variance == pytest.approx(each.var(ddof=1), rel=0.05)
    speeds.end_of_batch()
    fresh = speeds.sample(live_requests([50] * 200), 8)
    assert fresh.mean() == pytest.approx(1, abs=0.05)
    assert fresh.std() == pytest.approx(each.std(ddof=1), rel=0.1)


def by_chance(
    speeds: Speeds, each: Floats, steps: int, count: int, burst: int = 1, seed: int = 0
) -> tuple[LiveRequests, Floats]:
    """As `looks`, where runs of drafts are accepted by chance, and of as many for `burst` steps;
    and what each request seemed to accept per step."""
    random = np.random.default_rng(seed)
    runs = random.geometric(1 / (1 + each), ((count - 1) * steps // burst, len(each))) - 1
    accepted = np.vstack((np.zeros(len(each), np.int64), runs.repeat(burst, axis=0).cumsum(axis=0)))
    for look in range(count):
        done = look * steps
        live = live_requests([50] * len(each), 1 + done + accepted[done], steps=done)
        speeds.observe(live, 1.0)
    return live, accepted[done] / max(1, done)


def test_what_little_shows_is_trusted_little() -> None:
    each, speeds = np.linspace(0.4, 1.6, 32), Speeds()
    by_chance(speeds, each, 100, 20)
    assert speeds.variance == pytest.approx(each.var(ddof=1), rel=0.3)
    speeds.end_of_batch()
    live, seemed = by_chance(speeds, each, 5, 2, seed=1)
    sampled = speeds.sample(live, 64).mean(axis=1)
    assert (abs(sampled - 1) < 0.5 * abs(seemed - 1) + 0.1).all()


def test_chance_that_lasts_is_not_taken_for_a_requests_own_speed() -> None:
    of_own, of_chance = Speeds(), Speeds()
    by_chance(of_chance, np.ones(64), 160, 12, burst=80)
    by_chance(of_own, np.linspace(0.4, 1.6, 64), 160, 12)
    assert of_chance.variance < 0.2 * of_own.variance
    live, _ = by_chance(of_own, np.linspace(0.4, 1.6, 64), 160, 2, seed=1)
    trusting = of_own.sample(live, 64).mean(axis=1)
    of_own.end_of_batch()
    by_chance(of_own, np.linspace(0.4, 1.6, 64), 160, 40, burst=80, seed=2)
    of_own.end_of_batch()
    live, _ = by_chance(of_own, np.linspace(0.4, 1.6, 64), 160, 2, seed=1)
    doubting = of_own.sample(live, 64).mean(axis=1)
    assert doubting.std() < 0.8 * trusting.std()


@pytest.mark.parametrize("what", ["waits", "moves", "has no drafts", "had no token"])
def test_times_that_say_nothing_are_not_counted(what: str) -> None:
    """A request that waits makes no token; after a switch its replica's steps are counted anew."""
    each, speeds = np.linspace(0.4, 1.6, 16), Speeds()
    live = looks(speeds, each, 1000)
    before = speeds.sample(live, 8)
    tokens, steps = live.num_output_tokens.copy(), live.replica_steps + 500
    if what == "moves":
        speeds.moved()
        tokens += 1500
    elif what == "had no token":
        speeds._seen[0] = 0
        tokens += 1500
    elif what == "waits":
        tokens[1:] += np.round(500 * (1 + each[1:])).astype(int)
    else:
        tokens += 500
    speeds.observe(replace(live, num_output_tokens=tokens, replica_steps=steps), 1.0)
    after = speeds.sample(live, 8)
    assert after == pytest.approx(before, abs=0.01)


def test_requests_that_come_and_go_are_told_apart() -> None:
    each, speeds = np.linspace(0.4, 1.6, 16), Speeds()
    live = looks(speeds, each, 1000)
    before = speeds.sample(live, 8).mean(axis=1)
    left = np.array([12, 3, 15])
    kept = LiveRequests(*(getattr(live, name)[left] for name in LiveRequests.__dataclass_fields__))
    speeds.observe(kept, 1.0)
    assert speeds.sample(kept, 8).mean(axis=1) == pytest.approx(before[left], abs=0.1)


# What draft lengths give such requests


def learnt(share: float) -> Acceptance:
    """Drafts that are accepted with this probability, if those before them were."""
    random, acceptance = np.random.default_rng(0), Acceptance(LENGTHS)
    for _ in range(2000):
        acceptance.observe(7, 64, np.minimum(random.geometric(1 - share, 64) - 1, 7))
    return acceptance


def test_a_usual_request_gets_what_is_expected_and_slow_ones_gain_little_from_long_drafts() -> None:
    acceptance = learnt(0.5)
    slow, usual, fast = acceptance.tokens_at(np.array([0.3, 1.0, 1.7])).T
    assert usual == pytest.approx(acceptance.expected().tokens)
    assert (slow[1:] < usual[1:]).all() and (usual[1:] < fast[1:]).all()
    assert slow[0] == usual[0] == fast[0] == 1
    assert slow[4] / slow[2] < 1.05 < 1.12 < usual[4] / usual[2] < fast[4] / fast[2]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_speeds_stand_for_shares_of_accepted_drafts(share: float) -> None:
    """A request of another share has the tokens of that share, to a few percent."""
    acceptance = learnt(share)

    def tokens(each: float) -> Floats:
        return np.array([(1 - each ** (k + 1)) / (1 - each) for k in LENGTHS])

    for other in (0.6 * share, 0.8 * share, 1.2 * share):
        speed = (tokens(other)[4] - 1) / (tokens(share)[4] - 1)
        assert acceptance.tokens_at(np.array(speed)) == pytest.approx(tokens(other), rel=0.03)


# What is ahead of them


def forecast_seconds(
    remaining: Ints,
    tokens: Floats,
    each: float = 0.0,
    now: Floats | None = None,
    saturating: float = 0.0,
) -> float:
    """Predicted seconds to the end with drafts that make these tokens per step, where a step takes
    1 s and `each` more per request, and up to `saturating` more with many.

    With the drafts of now, which are too dear to go on with, a step makes the tokens `now`.
    """
    count = len(remaining)
    costs = np.array([[1e6], [1.0]])

    def step(layout: Layout, running: Floats, *_: object) -> Floats:
        return (1 + each * (running - 1) + saturating * (1 - 0.9**running)) * costs

    planner = Planner(
        (ONE,), step, lambda *_: np.zeros(()), max_num_seqs={1: 10**6}, kv_tokens={1: 10**9}
    )
    per_step = np.stack((tokens if now is None else now, tokens))
    mean = 1 / (1 / per_step).mean(axis=1)
    draft_yield = DraftYield(np.array([2, 4]), mean, np.array([2.0, 4.0]))
    ahead = forecast(live_requests([10] * count), remaining[:, None], per_step[:, :, None])
    return planner.layout_costs(ahead, draft_yield=draft_yield).plan(ONE).no_switch


requests = st.lists(st.tuples(st.integers(1, 5000), st.floats(1.0, 5.0)), min_size=1, max_size=40)


@settings(max_examples=60)
@given(requests)
def test_a_batch_takes_as_long_as_its_slowest_request(batch: list[tuple[int, float]]) -> None:
    remaining, tokens = (np.array(column) for column in zip(*batch, strict=True))
    assert forecast_seconds(remaining, tokens) == pytest.approx((remaining / tokens).max())


@settings(max_examples=60)
@given(requests, st.floats(0.001, 0.1))
def test_each_request_pays_for_its_own_steps(batch: list[tuple[int, float]], each: float) -> None:
    remaining, tokens = (np.array(column) for column in zip(*batch, strict=True))
    steps = remaining / tokens
    expected = steps.max() + each * (steps.sum() - steps.max())
    assert forecast_seconds(remaining, tokens, each) == pytest.approx(expected)


def test_with_other_drafts_each_request_pays_for_its_own_steps() -> None:
    """All are to end together; with the other drafts all but one end in half of the time."""
    remaining, tokens = np.array([101] + [100] * 49), np.array([1.0] + [2.0] * 49)
    seconds = forecast_seconds(remaining, tokens, 0.1, now=np.ones(50))
    assert seconds == pytest.approx(101 + 0.1 * 49 * 50, rel=0.05)


def test_steps_of_mixtures_take_long_while_requests_end_one_after_another() -> None:
    """All are to end together, after 100 steps; with the other drafts between 50 and 100."""
    steps = np.linspace(100, 50, 50)
    remaining = np.array([101] + [100] * 49)
    seconds = forecast_seconds(remaining, 100 / steps, now=np.ones(50), saturating=8)
    live = (np.arange(100)[:, None] < steps).sum(axis=1)
    assert seconds == pytest.approx((1 + 8 * (1 - 0.9**live)).sum(), rel=0.03)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_equal_speeds_change_nothing(lengths: list[int]) -> None:
    live, remaining = live_requests([100] * len(lengths)), np.array(lengths)[:, None]
    plain = forecast(live, remaining)
    same = forecast(live, remaining, np.full((2, len(lengths), 1), 1.0), 1)
    for name in ("live", "most", "steps", "context", "longest"):
        assert getattr(same, name) == pytest.approx(getattr(plain, name))
    assert same.steps_per_token is not None and (same.steps_per_token == 1).all()


def test_batches_of_unlike_requests_take_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses of equal lengths, of which the slowest decides; simulated on a modelled profile."""
    lengths = (0, 1, 2, 4, 7)
    profile = modelled_profile(
        "qwen3-30b-a3b", "H100", 8, layouts=(4, 8), draft_lengths=lengths, experts="tp"
    )
    traces = [replace(uniform(128, 964, 1024, seed=seed), acceptance=0.7) for seed in range(3)]

    def seconds() -> float:
        policy = AdaptivePolicy(profile, bound=1024, draft_lengths=lengths, timer=lambda: 0.0)
        reports = simulate_batches(traces, policy, ReplayedGroundTruth(profile), profile)
        return sum(report.seconds for report in reports[1:])

    knowing = seconds()
    monkeypatch.setattr(Speeds, "variance", 0.0)
    assert knowing < 0.99 * seconds()

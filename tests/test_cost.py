"""What a switch costs, and the way that its requests' KV takes: one model says both."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.predictor.cost import CarryRates, CostModel
from pat_vllm.profiling.profile import Profile, StepSample, SwitchSample
from pat_vllm.reporting import SwitchReport

RANKS = 4
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2, 4))
ONE, TWO, FOUR = LAYOUTS


def a_switch(source, target, num_seqs, tokens, seconds):
    return SwitchSample(
        source=source,
        target=target,
        num_seqs=num_seqs,
        tokens=tokens,
        kv_bytes=0,
        seconds=seconds,
        kv=0.0,
        weights=0.0,
    )


def a_step(layout, prefill=0, seconds=0.01):
    return StepSample(
        layout=layout,
        batch=int(not prefill),
        context=int(not prefill),
        longest=int(not prefill),
        prefill=prefill,
        busy=layout.replicas,
        seconds=seconds,
        low=seconds,
        high=seconds,
        repeats=3,
    )


def a_profile(switches=(), prefill=None):
    """`prefill`: seconds for 100 prompt tokens in each replica, by layout."""
    steps = [a_step(layout) for layout in LAYOUTS]
    steps += [a_step(layout, 100, seconds) for layout, seconds in (prefill or {}).items()]
    return Profile(
        kind="modelled",
        title="",
        created="",
        key={},
        ranks=RANKS,
        layouts=LAYOUTS,
        max_num_seqs={layout.tp: 8 for layout in LAYOUTS},
        max_batch_tokens={layout.tp: 128 for layout in LAYOUTS},
        kv_tokens={layout.tp: 1000 for layout in LAYOUTS},
        kv_bytes_per_token=4,
        steps=tuple(steps),
        switches=tuple(switches),
    )


def a_report(num_seqs=4, tokens=4000, *, migrated=None, seconds=1.0, kv=0.5, kv_bytes=1 << 24):
    migrated = num_seqs if migrated is None else migrated
    return SwitchReport(
        at=0.0,
        source=ONE,
        target=FOUR,
        reason="policy",
        num_seqs=num_seqs,
        migrated=migrated,
        recomputed=num_seqs - migrated,
        kv_bytes=kv_bytes if migrated else 0,
        seconds=seconds,
        quiesce=0.0,
        plan=0.0,
        states=0.0,
        kv=kv,
        weights=0.0,
        activate=0.0,
        rpc=0.0,
        finish=0.0,
        tokens=tokens,
    )


def linear(source, target, fixed, per_request, per_token):
    """Samples of a switch that is exactly linear."""
    return [
        a_switch(source, target, n, t, fixed + per_request * n + per_token * t)
        for n, t in ((0, 0), (1, 100), (8, 800), (8, 8000), (32, 3200))
    ]


# ---------------------------------------------------------------- one model

positive = st.floats(1e-7, 1e-2)


@st.composite
def models(draw):
    """Models from rates, from profiles, from both, all of them with some switches observed."""
    rates = CarryRates(
        draw(positive), {one: draw(positive) for one in LAYOUTS if draw(st.booleans())}
    )
    model = CostModel("auto", draw(st.sampled_from([None, rates])))
    if draw(st.booleans()):
        switches = [
            sample
            for source, target in ((ONE, FOUR), (FOUR, ONE), (ONE, TWO))
            if draw(st.booleans())
            for sample in linear(source, target, draw(positive), draw(positive), draw(positive))
        ]
        prefill = {one: draw(positive) for one in LAYOUTS if draw(st.booleans())}
        model.fit(a_profile(switches, prefill))
    for _ in range(draw(st.integers(0, 3))):
        num_seqs = draw(st.integers(1, 9))
        model.observe(
            a_report(
                num_seqs,
                draw(st.integers(1, 100_000)),
                migrated=draw(st.integers(0, num_seqs)),
                seconds=draw(st.floats(1e-4, 10)),
                kv=draw(st.floats(1e-5, 1)),
                kv_bytes=draw(st.sampled_from([100, 1 << 24])),
            )
        )
    return model


@given(models(), st.permutations(LAYOUTS), st.lists(st.integers(0, 50_000), min_size=1))
def test_requests_are_carried_as_predicted(model, layouts, tokens):
    """The way that each request is given is the one whose cost is in the prediction."""
    source, target, _ = layouts
    num_seqs = len(tokens)
    predicted = model.seconds(source, target, num_seqs, sum(tokens))
    ways = {model.choose(n, source, target, num_seqs) for n in tokens}
    assert len(ways) == 1, "both ways are linear in a request's tokens"
    seconds = {}
    for mode in ("migrate", "recompute"):
        model.mode = mode
        assert {model.choose(n, source, target, num_seqs) for n in tokens} == {mode}
        seconds[mode] = model.seconds(source, target, num_seqs, sum(tokens))
    assert seconds[ways.pop()] == pytest.approx(predicted)
    assert predicted == pytest.approx(min(seconds.values()))


@given(models(), st.permutations(LAYOUTS))
def test_arrays_are_predicted_as_numbers_are(model, layouts):
    source, target, _ = layouts
    num_seqs, tokens = np.array([1.0, 3.0, 64.0]), np.array([10.0, 5e3, 1e6])
    together = model.seconds(source, target, num_seqs, tokens)
    alone = [model.seconds(source, target, *one) for one in zip(num_seqs, tokens, strict=True)]
    assert together.tolist() == pytest.approx(alone)


# ---------------------------------------------------------------- without a profile


def test_rates_measured_at_start_decide_without_a_profile():
    rates = CarryRates(1000 / 1e7, {ONE: 1 / 5e3, TWO: 1 / 1e4, FOUR: 1 / 2e4})
    assert rates.migrate == pytest.approx(1e-4)
    model = CostModel("auto", rates)
    # 2e-4 s a token in one replica of tp 1, of which four work side by side.
    assert model.choose(100, FOUR, ONE, num_seqs=1) == "migrate"
    assert model.choose(100, FOUR, ONE, num_seqs=4) == "recompute"
    assert model.choose(100, ONE, FOUR, num_seqs=400) == "recompute"  # 5e-5 s, in the one there is
    assert CostModel("migrate", rates).choose(100, FOUR, ONE, 4) == "migrate"
    assert CostModel("recompute", rates).choose(100, FOUR, ONE, 1) == "recompute"
    assert CostModel().choose(100, FOUR, ONE, 4) == "migrate", "nothing is known"


def test_exchanges_correct_the_rates():
    model = CostModel("auto", CarryRates(1e-6, {FOUR: 1e-5}))
    assert model.choose(1000, ONE, FOUR, 4) == "migrate"
    slow = a_report(tokens=4000, kv=0.08, seconds=9.0)  # 2e-5 s a token; the rest is no KV
    model.observe(replace(slow, kv_bytes=1000))
    assert model.choose(1000, ONE, FOUR, 4) == "migrate", "so few bytes tell the latency"
    model.observe(slow)
    assert model.choose(1000, ONE, FOUR, 4) == "recompute"
    assert model.choose(1000, TWO, FOUR, 4) == "migrate", "another pair of layouts"


# ---------------------------------------------------------------- with a profile


def test_a_profile_is_taken_in_place_of_the_rates():
    model = CostModel("auto", CarryRates(1.0, dict.fromkeys(LAYOUTS, 1e-9)))
    switches = linear(ONE, FOUR, 0.01, 1e-4, 1e-6) + linear(FOUR, ONE, 0.02, 2e-4, 5e-6)
    model.fit(a_profile(switches, prefill={FOUR: 1e-3, ONE: 1e-3}))  # 1e-5 s a token in a replica
    assert model.seconds(ONE, FOUR, 10, 1000) == pytest.approx(0.01 + 1e-3 + 1e-3, rel=1e-3)
    assert model.choose(100, ONE, FOUR, 10) == "migrate"
    assert model.choose(100, FOUR, ONE, 10) == "recompute"  # in four replicas side by side
    assert model.seconds(FOUR, ONE, 10, 1000) == pytest.approx(0.02 + 2e-3 + 2.5e-3, rel=1e-3)
    # The pair that it lacks takes the most expensive of the others, and tp 2 the rate at start.
    assert model.choose(100, ONE, TWO, 10) == "recompute"
    assert model.seconds(ONE, TWO, 10, 1000) == pytest.approx(0.02 + 2e-3, rel=1e-3)


def test_switches_correct_a_profile():
    model = CostModel.of(a_profile(linear(ONE, FOUR, 0.1, 0.01, 1e-4)), mode="migrate")
    expected = model.seconds(ONE, FOUR, 4, 4000)
    model.observe(a_report(4, 4000, seconds=2 * expected))
    assert model.seconds(ONE, FOUR, 4, 4000) == pytest.approx(2 * expected)
    model.observe(a_report(4, 4000, seconds=expected))
    assert model.seconds(ONE, FOUR, 4, 4000) == pytest.approx(2**0.5 * expected)
    model.observe(a_report(4, 4000, migrated=2, seconds=100.0))  # neither way's cost
    model.observe(a_report(0, 0, seconds=100.0))
    assert model.seconds(ONE, FOUR, 4, 4000) == pytest.approx(2**0.5 * expected)
    model.observe(a_report(4, 4000, seconds=1e6))
    assert model.seconds(ONE, FOUR, 4, 4000) < 21 * expected


def test_a_slow_switch_does_not_end_migration_for_good():
    """A switch that recomputes tells of everything but the KV, so that the model recovers."""
    profile = a_profile(linear(ONE, FOUR, 0.1, 0.01, 1e-4), prefill={FOUR: 0.02})  # 2e-4 s a token
    model = CostModel.of(profile)
    usual = 0.1 + 4 * 0.01
    model.observe(a_report(4, 4000, seconds=15 * (usual + 0.4)))
    assert model.choose(1000, ONE, FOUR, 4) == "recompute"
    for _ in range(6):
        model.observe(a_report(4, 4000, migrated=0, seconds=usual))
    assert model.choose(1000, ONE, FOUR, 4) == "migrate"

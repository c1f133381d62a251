"""What layouts and drafts saved: the arithmetic, and against batches that were really done so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.predictor.savings import PlannedSavings
from pat_vllm.predictor.state import LiveRequests, LiveState
from pat_vllm.profiling.profile import StepShape
from pat_vllm.reporting import BatchSavings, BatchTimes, Look, Savings, Stretch, SwitchReport, total
from pat_vllm.reporting import savings as savings_module
from pat_vllm.reporting.savings import in_step
from pat_vllm.simulator import traces
from pat_vllm.simulator.modelled.hardware import named_profile
from pat_vllm.simulator.replay import simulate_batches
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.truth import ReplayedTruth
from tests.support.mutation import mutated
from tests.test_adaptive import BOUND, batches, make_profile, policy_of

ONE, TWO = Layout(1, 2), Layout(2, 1)


def pace(layout: Layout, live: float, context: float) -> float:
    """Seconds in which every live request gets a token; linear, so that means are exact."""
    return 0.01 / layout.tp + 0.002 * live + 1e-7 * context


class Known(Savings):
    """Savings by a model that is right."""

    def plain_seconds(self, layout: Layout, stretches: Sequence[Stretch]) -> list[float]:
        return [s.tokens * pace(layout, s.live, s.context) for s in stretches]


def a_switch(target: Layout, stall: float, reason: str = "policy") -> SwitchReport:
    values: dict[str, Any] = dict.fromkeys(SwitchReport.__dataclass_fields__, 0)
    values |= {"source": ONE, "target": target, "reason": reason}
    return SwitchReport(**values | {"seconds": stall + 0.5, "quiesce": 0.5})


@dataclass(frozen=True)
class Part:
    """A stretch to be.

    Attributes:
        stall: seconds of a switch to `layout` at its beginning; None for no switch.
        left: requests that are left at its end.
        tokens: that each request gets.
        faster: what drafts make of a token's time; None for no drafts.
        arrivals: whether a request with a long prompt arrives in it.
    """

    layout: Layout = ONE
    stall: float | None = None
    left: int = 8
    tokens: int = 100
    faster: float | None = None
    arrivals: bool = False


def replayed(
    parts: Sequence[Part], slower: float = 1.0, looks: int = 1
) -> tuple[BatchSavings, BatchTimes]:
    """What is estimated for a batch of these parts, and what is true.

    Args:
        slower: than its model the engine is.
        looks: into how many parts of as many tokens each is cut.
    """
    savings, now, made, live, length = Known(ONE), 5.0, 0, 8, 20.0
    fixed = switching = 0.0
    savings.arrived()
    for part in parts:
        for cut in range(looks):
            left = min(part.left, live) if cut == looks - 1 else live
            begin = Look(
                now, part.layout, live, round(live * length), round(length), made, prompt=1e6
            )
            if part.stall is not None and cut == 0:
                savings.look(replace(begin, layout=ONE if part.layout == TWO else TWO))
                savings.switched(a_switch(part.layout, part.stall))
                now += part.stall
                switching += part.stall
            else:
                savings.look(begin)
            if part.arrivals:
                savings.arrived()
            if part is parts[-1] and cut == looks - 1:
                left = 0
            mean = 0.5 * (live + max(1, left))
            tokens = part.tokens * 2  # times a mean that may be half a request, a whole number
            context = mean * (length + 0.5 * tokens)
            plain = tokens * pace(part.layout, mean, context) * slower
            real = plain * (part.faster or 1.0)
            savings.drafted(0)
            if part.faster is not None:
                savings.drafted(4)
            now += real
            switching += plain if not part.arrivals else real
            fixed += (
                real
                if part.arrivals
                else plain
                if part.layout == ONE
                else tokens * pace(ONE, mean, context)
            )
            made += round(mean * tokens)
            length += tokens
            live = left
    savings.end(now, made)
    (record,) = savings.since()
    return record, BatchTimes(fixed, switching, now - 5.0)


LAYOUTS = st.sampled_from([ONE, TWO])
PARTS = st.builds(
    Part,
    layout=LAYOUTS,
    stall=st.just(0.25),
    left=st.integers(1, 8),
    tokens=st.integers(1, 200),
    faster=st.none() | st.floats(0.2, 1.5),
    arrivals=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(parts=st.lists(PARTS, min_size=1, max_size=6), looks=st.integers(1, 3))
def test_by_a_model_that_is_right_the_estimate_is(parts: list[Part], looks: int) -> None:
    parts[0] = replace(parts[0], stall=None)
    check_estimate(parts, looks)


def check_estimate(parts: Sequence[Part], looks: int = 1) -> None:
    record, truth = replayed(parts, looks=looks)
    assert record.layout == ONE
    for name in ("fixed", "switching", "drafting"):
        # Contexts are counted in whole tokens.
        assert getattr(record.realised, name) == pytest.approx(getattr(truth, name), rel=1e-3)


ALL = [
    Part(),
    Part(faster=0.7, left=6),
    Part(TWO, 0.25, 4),
    Part(TWO, None, 2, faster=0.5),
    Part(TWO, None, 2, arrivals=True, faster=0.5),
    Part(ONE, 0.25, 1, faster=0.8),
]


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (Savings.switched, {"report.seconds - report.quiesce": "report.seconds"}),
        (Savings.switched, {"self._layout = report.target": "pass"}),
        (Savings.arrived, {"+= 1": "+= 0"}),
        (Savings.drafted, {"length > 0": "False"}),
        (Savings._new_stretch, {"self._drafts = False": "self._drafts = True"}),
        (Savings._close, {"max(1, now.num_seqs)": "now.num_seqs"}),
        (Savings._close, {"begin.context / begin.num_seqs + 0.5 * tokens": "0.0"}),
        (Savings._fold, {"taken - stalled - sum": "taken - sum"}),
        (Savings._fold, {"taken - sum(s.seconds - s.stall for": "taken - sum(s.seconds for"}),
        (Savings._fold, {"s.drafts or s.layout != base": "s.drafts"}),
        (Savings._fold, {"self.plain_seconds(layout, here)": "self.plain_seconds(base, here)"}),
    ],
)
def test_mistakes_are_seen(method: Any, changes: dict[str, str]) -> None:
    check_estimate(ALL)
    with mutated(method, changes), pytest.raises(AssertionError):
        check_estimate(ALL)
        check_without_either()


def test_nothing_is_saved_by_nothing_whatever_the_model_says() -> None:
    check_without_either()


def check_without_either() -> None:
    record, _ = replayed([Part(left=5), Part(left=2)], slower=3.0)
    times = record.realised
    assert times.fixed == times.switching == times.drafting
    assert times.saved_by_layouts == times.saved_by_drafts == 0.0
    # Where no draft was asked for, none saved anything.
    record, _ = replayed([Part(left=5), Part(TWO, 0.25, 2)], slower=3.0)
    assert record.realised.switching == record.realised.drafting


def test_shares() -> None:
    times = BatchTimes(10.0, 8.0, 5.0)
    assert (times.saved_by_layouts, times.saved_by_drafts) == pytest.approx((0.2, 0.3))
    assert BatchTimes(0.0, 0.0, 0.0).saved_by_drafts == 0.0
    assert total([times, BatchTimes(1.0, 2.0, 3.0)]) == BatchTimes(11.0, 10.0, 8.0)
    assert total([]) == BatchTimes(0, 0, 0)


def test_long_batches_are_added_up_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, _ = replayed(ALL, looks=4)
    monkeypatch.setattr(savings_module, "_FOLD", 3)
    in_parts, _ = replayed(ALL, looks=4)
    for name in ("fixed", "switching", "drafting"):
        assert getattr(in_parts.realised, name) == pytest.approx(getattr(at_once.realised, name))


def test_what_is_not_counted() -> None:
    """Many prompts, a layout that a user asked for, batches without a plan."""
    savings = Known(ONE)
    savings.end(1.0, 0)
    assert not savings.since()
    for reason, prompts in (("policy", 900), ("forced", 0)):
        savings.look(Look(1.0, ONE, 8, 800, 100, 0, prompts))
        savings.switched(a_switch(TWO, 0.25, reason))
        savings.end(3.0, 800)
        last = savings.since()[-1]
        assert last.realised == BatchTimes(1.75, 2.0, 2.0), "but for the switch as it was"
    assert [one.at for one in savings.since(3.0)] == [3.0, 3.0]
    for prompt, counts in ((300.0, True), (500.0, False), (math.inf, False)):
        savings.look(Look(1.0, ONE, 8, 800, 100, 0, prompt=prompt))
        savings.switched(a_switch(TWO, 0.25))
        for _ in range(2):
            savings.arrived()
        savings.end(3.0, 800)
        assert (savings.since()[-1].realised.fixed != 1.75) == counts
    # Everybody was aborted before the next step ended.
    savings.look(Look(5.0, ONE, 8, 800, 100, 0))
    savings.end(3.0, 0)
    assert (savings.since()[-1].at, savings.since()[-1].realised.drafting) == (5.0, 0.0)
    assert not savings.since(5.1)


def test_the_prediction_is_of_the_most_requests() -> None:
    savings = Known(ONE)
    asked = []
    for number, live in enumerate((4, 8, 8, 6)):
        if savings.look(Look(float(number), ONE, live, 100, 20, 0)):
            asked.append(live)
            savings.predicted(BatchTimes(live, live, live))
    savings.end(9.0, 0)
    assert asked == [4, 8]
    assert savings.since()[0].predicted == BatchTimes(8, 8, 8)
    savings.look(Look(10.0, ONE, 2, 100, 20, 0))
    savings.end(11.0, 0)
    assert savings.since()[1].predicted == BatchTimes(0, 0, 0)


# ---------------------------------------------------------------- in batches


@pytest.mark.parametrize("name", ["long tail", "two modes", "short", "straggler"])
def test_estimates_of_simulated_batches(name: str) -> None:
    """Against the same batches in the layout in which they began, under the same truth."""
    profile = make_profile()
    truth, capacity = ReplayedTruth(profile), ReplicaCapacity.of(profile)
    policy = policy_of(profile)
    ours = simulate_batches(batches(name), policy, truth, capacity)
    static = simulate_batches(batches(name), StayPolicy(profile.layouts[0]), truth, capacity)
    records = policy.report().savings
    assert len(records) == len(ours)
    for record, run, fixed in zip(records, ours, static, strict=True):
        saved = 1 - run.generation_seconds / fixed.generation_seconds
        assert record.layout == profile.layouts[0]
        assert record.realised.saved_by_layouts == pytest.approx(saved, abs=0.05)
        assert record.realised.saved_by_drafts == 0.0
        assert record.realised.drafting == pytest.approx(run.generation_seconds, rel=0.1)
    # Lengths are learnt from batch to batch.
    last = records[-1]
    assert last.predicted.saved_by_layouts == pytest.approx(
        last.realised.saved_by_layouts, abs=0.12
    )


LENGTHS = (0, 1, 2, 4)


def test_estimates_of_simulated_batches_with_drafts() -> None:
    """Requests advance at paces of their own there, so that other ones are left at the end."""
    profile = named_profile("llama-3.1-8b", "H100", 4, draft_lengths=LENGTHS[1:])  # modelled
    truth, capacity = ReplayedTruth(profile), ReplicaCapacity.of(profile)
    policy = AdaptivePolicy(profile, bound=2048, draft_lengths=LENGTHS, timer=lambda: 0.0)
    trace = replace(traces.uniform(64, 1000, 2048, 2048, seed=0), acceptance=0.5)
    ours = simulate_batches([trace, trace], policy, truth, capacity)
    fixed = simulate_batches([trace], StayPolicy(profile.layouts[0]), truth, capacity)[0]
    for run, record in zip(ours, policy.report().savings, strict=True):
        saved = 1 - run.generation_seconds / fixed.generation_seconds
        times = record.realised
        assert times.saved_by_drafts > 0.1
        assert 1 - times.drafting / times.fixed == pytest.approx(saved, abs=0.03)
        assert times.fixed == pytest.approx(fixed.generation_seconds, rel=0.05)


def test_taking_them_for_equals_is_seen() -> None:
    wrong = {"in_step(counted, lengths)": "counted"}
    with mutated(Savings.end, wrong), pytest.raises(AssertionError):
        test_estimates_of_simulated_batches_with_drafts()


def check_in_step(lengths: Sequence[int], lives: Sequence[float]) -> None:
    parts = [Stretch(ONE, 1.0, 0.0, True, True, 10.0 + i, m, 9, 9) for i, m in enumerate(lives)]
    found = in_step(parts, lengths)
    assert [replace(one, tokens=0) for one in found] == [replace(one, tokens=0) for one in parts]
    # Somebody generates until the longest response ends.
    assert sum(one.tokens for one in found) == pytest.approx(max(lengths))


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=12),
    st.lists(st.sampled_from([1.0, 1.5, 3.0, 8.0, 12.0]), min_size=1, max_size=8),
)
def test_requests_that_advance_alike(lengths: list[int], lives: list[float]) -> None:
    check_in_step(lengths, lives)


def test_tokens_come_where_as_many_are_live() -> None:
    # Three are live for 10 tokens, two for 20 and one for 70.
    parts = [Stretch(ONE, 1.0, 0.0, True, True, t, m, 9, 9) for t, m in ((5, 3), (15, 3), (9, 1.4))]
    assert [one.tokens for one in in_step(parts, [10, 30, 100])] == [2.5, 7.5, 90.0]
    assert in_step([], [10]) == []


def decode(
    policy: AdaptivePolicy, requests: int, length: int, hit: float, exact: bool, slower: float = 1.0
) -> tuple[float, float]:
    """A batch of responses of one length in the home layout, with drafts as the policy plans.

    Returns:
        Seconds from its first plan on, and what steps without drafts would have taken.
    """
    layout, now = policy.home, 1000.0 * (1 + policy.report().batches)
    batch = requests // layout.replicas
    for request in range(requests):
        policy.arrived(now, request)
    random = np.random.default_rng(0)
    made, k, began, plain = 0.0, 0, now, 0.0
    ones = np.ones(requests, np.int64)
    while made < length:
        outputs = round(made) * ones
        live = LiveRequests(
            num_prompt_tokens=100 * ones,
            num_output_tokens=outputs,
            max_tokens=(length if exact else BOUND * 4) * ones,
            exact=ones == (1 if exact else 0),
            group=ones.cumsum(),
            replica=ones.cumsum() % layout.replicas,
            num_computed_tokens=100 + outputs,
        )
        policy.choose(LiveState(now, layout, requests, 10.0, partial(copy, live)))
        hits = random.random(batch) < hit
        context = round(batch * (100 + made))
        shape = StepShape(
            batch, context, round(100 + made), 0, layout.replicas, k * int(hits.sum()), k
        )
        seconds = policy._steps.step(layout, shape) * slower
        none = replace(shape, drafts=0, k=0)
        tokens = 1 + k * hits.mean()
        plain += tokens * policy._steps.step(layout, none) * slower
        now += seconds
        made += tokens
        for _ in range(layout.replicas):
            policy.drafted(now, k, batch, np.full(int(hits.sum()), k))
            policy.stepped(now, layout, shape, seconds)
        table = policy.drafts.get(layout, ((1, batch, 0),))
        k = next((one for first, last, one in table if first <= batch <= last), 0)
    if not exact:
        for request in range(requests):
            policy.finished(now, request, round(made), True)
    policy.idle(now + 500.0)  # told long afterwards
    return now - began, plain


@pytest.mark.parametrize("exact", [False, True], ids=["open ends", "prescribed lengths"])
@pytest.mark.parametrize("hit", [0.6, 0.0], ids=["hits", "no hits"])
def test_estimates_of_drafts(hit: float, exact: bool) -> None:
    profile = named_profile("llama-3.1-8b", "H100", 1, draft_lengths=LENGTHS[1:])  # modelled
    policy = AdaptivePolicy(profile, bound=4 * BOUND, draft_lengths=LENGTHS, timer=lambda: 0.0)
    for _ in range(2):
        seconds, plain = decode(policy, 8, 1500, hit, exact)
    record = policy.report().savings[-1]
    assert record.realised.drafting == pytest.approx(seconds, rel=0.02)
    assert record.realised.saved_by_layouts == 0.0
    saved = 1 - seconds / plain
    assert saved > 0.4 if hit else abs(saved) < 0.05
    assert record.realised.saved_by_drafts == pytest.approx(saved, abs=0.02)
    assert record.predicted.saved_by_drafts == pytest.approx(saved, abs=0.1)


def test_planning_asks_for_a_plan_without_drafts_once_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = named_profile("llama-3.1-8b", "H100", 1, draft_lengths=LENGTHS[1:])  # modelled
    policy = AdaptivePolicy(profile, bound=4 * BOUND, draft_lengths=LENGTHS, timer=lambda: 0.0)
    made = []
    outlook = policy._planner.outlook

    def counted(*args: Any, **options: Any) -> Any:
        made.append("drafting" in options)
        return outlook(*args, **options)

    monkeypatch.setattr(policy._planner, "outlook", counted)
    decode(policy, 8, 1500, 0.6, False)
    assert made.count(False) == 1 and made.count(True) > 3


def test_a_policy_that_does_not_choose_draft_lengths_still_tells_them_apart() -> None:
    """They are the user's: what drafts save is not credited to switching."""
    told = []

    class Told(PlannedSavings):
        def drafted(self, length: int) -> None:
            told.append(length)

    policy = AdaptivePolicy(make_profile(), bound=BOUND, timer=lambda: 0.0)
    policy._savings = Told(policy._planner)
    policy.drafted(1.0, 3, 4, np.zeros(4, np.int64))
    assert told == [3]

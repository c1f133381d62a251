"""The benchmark: its workloads, its statistics, its files, and all of it with real engines."""

import dataclasses
import json
import os
import statistics
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.bench.__main__ import app
from benchmarks.bench.calibrated import CalibratedSimulator, calibrate_simulator
from benchmarks.bench.judgement import MISSED_SHARE, judge
from benchmarks.bench.plot import plot_bench
from benchmarks.bench.ratios import best_of_each, better_static, paired_ratio
from benchmarks.bench.report import content_of, markdown
from benchmarks.bench.run import (
    BenchSettings,
    Measurements,
    command_of,
    engine_options,
    judge_workload,
    sides,
)
from benchmarks.bench.runs import PAT, Run, prediction_error
from benchmarks.bench.serve import Served, requests_of, run_of
from benchmarks.bench.workloads import (
    MAX_TOKENS,
    PROMPT_TOKENS,
    WORKLOADS,
    choose,
    from_lengths,
)
from benchmarks.common import stock_limits
from benchmarks.engine_process import EngineProcess
from benchmarks.paper.clairvoyant import clairvoyant
from benchmarks.record import Summary
from pat_vllm.cli.results import to_json
from pat_vllm.config import PATConfig, PredictorPolicyConfig, StaticPolicyConfig
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.profiling.profile import Profile, StepSample
from pat_vllm.reporting import (
    DecisionReport,
    LayoutSteps,
    LiveSample,
    PredictorReport,
    Report,
    SwitchReport,
)
from pat_vllm.simulator.replay import simulate
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import ScaledTruth
from tests.engines import engine_processes
from tests.support.fork_server import context

from .models import random_model

ONE, TWO = Layout(1, 2), Layout(2, 1)
BEGAN = 100.0
GONE_WITHIN = 150.0
"""Seconds until the processes of engines that were closed are gone."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


# ---------------------------------------------------------------- workloads


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_workloads_are_bounded_and_repeatable(name, scale):
    workload = WORKLOADS[name]
    first = workload.trace(1, scale, seed=3)
    assert first == workload.trace(1, scale, seed=3)
    assert first.name == name
    # Repeats and seeds draw new lengths, of as many requests.
    for other in (workload.trace(2, scale, seed=3), workload.trace(1, scale, seed=4)):
        assert len(other) == len(first)
        assert other.num_prompt_tokens != first.num_prompt_tokens
    assert max(first.lengths) <= first.max_tokens == MAX_TOKENS * scale
    assert (
        PROMPT_TOKENS[0]
        <= min(first.num_prompt_tokens)
        <= max(first.num_prompt_tokens)
        <= PROMPT_TOKENS[1]
    )
    assert (max(first.arrivals) > 0) == workload.waits


def lengths_of(name, repeats=range(1, 41)):
    return [n for r in repeats for n in WORKLOADS[name].trace(r).lengths]


def test_workloads_have_the_shapes_that_they_claim():
    lognormal = lengths_of("lognormal")
    share = sum(n > MAX_TOKENS / 3 for n in lognormal) / len(lognormal)
    assert 0.09 < share < 0.13  # DeepScaleR: 10.85 %
    assert 0.012 < sum(n == MAX_TOKENS for n in lognormal) / len(lognormal) < 0.032  # 2.19 %
    two_mode = lengths_of("two_mode")
    late = sum(n >= 2 / 3 * MAX_TOKENS for n in two_mode) / len(two_mode)
    assert 0.06 < late < 0.13
    assert statistics.median(two_mode) < MAX_TOKENS / 10
    straggler = sorted(WORKLOADS["straggler"].trace(1).lengths)
    assert straggler[-1] > 7 * straggler[-2]
    short, middle = (statistics.median(lengths_of("shift", [r])) for r in (1, 2))
    assert 2 < middle / short < 4.5
    assert WORKLOADS["shift"].changes


def test_workloads_are_chosen_by_name():
    assert [one.name for one in choose(None)] == list(WORKLOADS)
    assert [one.name for one in choose("shift, lognormal,shift")] == ["shift", "lognormal"]
    with pytest.raises(ValueError, match=r"'longnormal' is unknown.*lognormal, two_mode"):
        choose("longnormal")
    with pytest.raises(ValueError, match="no workload"):
        choose(",")


def test_lengths_of_a_file_are_a_workload(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("earlier.json")
    path.write_text("[10, 20, 300]")
    workload = from_lengths(path, 40)
    assert workload.name == "earlier"
    trace = workload.trace(1)
    assert trace == workload.trace(1) != workload.trace(2)
    assert len(trace) == 40 and {*trace.lengths} == {10, 20, 300}
    assert trace.max_tokens == MAX_TOKENS
    assert {*workload.trace(1, 0.5).lengths} <= {5, 10, 150}
    asked = BenchSettings(tmp_path, 2, (workload,), 2, "full", seed=0)
    command = "python -m benchmarks.bench --ranks 2 --repeats 2 --scale full --seed 0"
    assert command_of(asked, True) == f"{command} --lengths earlier.json --requests 40"
    path.write_text(f"[{MAX_TOKENS + 1}]")
    with pytest.raises(ValueError, match=r"earlier.json has a response of 321 tokens"):
        from_lengths(path, 40)


# ---------------------------------------------------------------- statistics


def test_a_paired_ratio_cancels_what_both_sides_had_in_common():
    # The machine is twice as slow in the second repeat; ours takes 0.8 of theirs in each.
    ratio = paired_ratio([8.0, 16.0, 4.0], [10.0, 20.0, 5.0])
    assert ratio.mean == pytest.approx(0.8)
    assert (ratio.low, ratio.high) == (pytest.approx(0.8), pytest.approx(0.8))
    assert ratio.show() == "0.80 (0.80-0.80)"


def test_the_interval_covers_the_mean_and_shrinks_with_repeats():
    few = paired_ratio([9.0, 11.0, 10.0, 8.0], [10.0] * 4, seed=1)
    assert few == paired_ratio([9.0, 11.0, 10.0, 8.0], [10.0] * 4, seed=1)
    assert 0.8 <= few.low < few.mean < few.high <= 1.1
    many = paired_ratio([9.0, 11.0, 10.0, 8.0] * 8, [10.0] * 32, seed=1)
    assert many.mean == pytest.approx(few.mean)
    assert many.high - many.low < 0.6 * (few.high - few.low)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=8), st.integers(0, 100))
def test_the_interval_lies_within_the_repeats(seconds, seed):
    ratio = paired_ratio(seconds, [1.0] * len(seconds), seed)
    assert min(seconds) * 0.999 <= ratio.low <= ratio.mean * 1.001
    assert ratio.mean * 0.999 <= ratio.high <= max(seconds) * 1.001


def test_a_ratio_needs_pairs():
    with pytest.raises(ValueError, match="at least one"):
        paired_ratio([], [])
    with pytest.raises(ValueError):
        paired_ratio([1.0, 2.0], [1.0])


def test_the_better_static_layout_has_the_lower_median():
    seconds = {"tp1dp2": [5.0, 6.0, 30.0], "tp2dp1": [7.0, 7.0, 7.0]}
    assert better_static(seconds) == "tp1dp2"
    assert best_of_each(seconds) == [5.0, 6.0, 7.0]


# ---------------------------------------------------------------- a run, cut out of a report


def a_switch(at, source=ONE, target=TWO, live=2, reason="policy", seconds=0.1):
    zeros = dict.fromkeys(("states", "kv", "weights", "activate", "rpc", "finish", "plan"), 0.0)
    return SwitchReport(
        at=BEGAN + at,
        source=source,
        target=target,
        reason=reason,
        num_seqs=live,
        migrated=live,
        recomputed=0,
        kv_bytes=0,
        seconds=seconds,
        quiesce=0.0,
        tokens=10 * live,
        weight_bytes=0,
        **zeros,
    )


def a_decision(at, source=ONE, target=TWO, live=2, stay=5.0, go=4.0, why="saving", fired=True):
    return DecisionReport(
        at=BEGAN + at,
        layout=source,
        target=target,
        num_seqs=live,
        stay=stay,
        go=go,
        cost=0.1,
        fired=fired,
        why=why,
        step_before=0.10,
        step_after=0.05,
        real_before=0.08 if fired else None,
        real_after=0.10 if fired else None,
        real_cost=0.2 if fired else None,
    )


def a_trace(lengths, arrivals=None, max_tokens=200):
    n = len(lengths)
    arrivals = (0.0,) * n if arrivals is None else arrivals
    groups = tuple(range(n))
    return LengthTrace("made up", tuple(lengths), tuple(arrivals), groups, (8,) * n, max_tokens)


def test_a_run_is_what_happened_since_the_batch_before():
    trace = a_trace([3, 9], arrivals=[0.0, 4.0])
    samples = [(-5.0, TWO, 3), (0.0, ONE, 1), (3.0, ONE, 0), (4.0, ONE, 1), (5.0, TWO, 1)]
    timeline = tuple(LiveSample(BEGAN + at, layout, live) for at, layout, live in samples)
    switches = (
        a_switch(-4.0),
        a_switch(2.0, TWO, ONE, live=0, reason="idle"),  # between the requests
        a_switch(5.0, live=1),
        a_switch(7.99, TWO, ONE, live=0, reason="idle"),  # when all was done
    )
    decisions = (a_decision(-4.0), a_decision(5.0), a_decision(6.0, fired=False))
    predictor = PredictorReport(decisions, {ONE: (30, 0.2)}, plans=9, planning=0.5)
    steps = {ONE: LayoutSteps(50, 6.0, 0.1), TWO: LayoutSteps(10, 1.0, 0.1)}
    after = Report(ONE, (ONE, TWO), switches, (), timeline, steps, predictor)
    before = Report(
        ONE,
        (ONE, TWO),
        (),
        (),
        (),
        {ONE: LayoutSteps(40, 4.0, 0.1), TWO: LayoutSteps(10, 1.0, 0.1)},
        PredictorReport((), {ONE: (10, 0.5)}, plans=5, planning=0.1),
    )
    served = Served(BEGAN, (BEGAN + 3.0, BEGAN + 8.0), (3, 9), after)
    run = run_of(PAT, trace, 2, served, before)
    assert (run.side, run.workload, run.repeat, run.tokens) == (PAT, "made up", 2, 12)
    assert run.seconds == 8.0 and run.exact
    assert run.response == pytest.approx((3.0 + 4.0) / 2)
    assert [(s.at - BEGAN, s.reason) for s in run.switches] == [(2.0, "idle"), (5.0, "policy")]
    assert run.switched == 1
    assert run.spans == ((ONE, 0.0, 2.0), (ONE, 2.0, 5.0), (TWO, 5.0, 8.0))
    assert run.live == ((0.0, 1), (4.0, 1), (5.0, 1), (8.0, 0))
    assert [d.at - BEGAN for d in run.decisions] == [5.0, 6.0]
    assert run.steps == {ONE: (10, pytest.approx(0.2))}
    assert run.step_error == {ONE: (20, pytest.approx(0.05))}
    assert (run.plans, run.planning) == (4, pytest.approx(0.4))
    short = dataclasses.replace(served, tokens=(3, 8))
    assert not run_of(PAT, trace, 2, short, before).exact


def test_prediction_errors_are_means_over_what_was_predicted():
    runs = [
        Run(PAT, "w", 1, BEGAN, 9.0, 10, 1.0, True, step_error={ONE: (10, 0.1), TWO: (5, 0.3)}),
        Run(
            PAT,
            "w",
            2,
            BEGAN,
            9.0,
            10,
            1.0,
            True,
            step_error={ONE: (30, 0.3)},
            decisions=(
                a_decision(1.0),
                a_decision(2.0, why="probe"),
                a_decision(3.0, fired=False),
            ),
            switches=(a_switch(1.0, seconds=0.3), a_switch(2.0, TWO, ONE, seconds=0.1)),
        ),
    ]
    error = prediction_error(runs)
    assert error.steps == {"tp1dp2": pytest.approx(0.25), "tp2dp1": pytest.approx(0.3)}
    assert error.before == pytest.approx(0.25)  # 0.10 for 0.08
    assert error.after == pytest.approx(0.5)  # 0.05 for 0.10
    assert error.cost == pytest.approx(0.5)  # twice 0.1 for 0.4
    assert error.saving == pytest.approx(1.0)  # the probe was no attempt to save
    nothing = prediction_error(runs[:1])
    assert (nothing.before, nothing.after, nothing.cost, nothing.saving) == (None, None, None, 0)


# ---------------------------------------------------------------- against the clairvoyant


class Crossover:
    """Steps of one group take half as long as replicas' with up to 4 requests, else twice."""

    def __init__(self, switch=0.01):
        self.switch = switch

    def step_seconds(self, layout, shape, now, steps=1):
        if layout == ONE:
            return 0.010
        return 0.005 if shape.batch <= 4 else 0.020

    def switch_seconds(self, source, target, live, tokens):
        return 0.0 if source == target else self.switch


TRACE = a_trace([10] * 12 + [100, 110])
CAPACITY = ReplicaCapacity(max_num_seqs=64)


def a_simulator(truth=None):
    return CalibratedSimulator(truth or Crossover(), CAPACITY, (ONE, TWO), {ONE: 1.0, TWO: 1.0})


def a_run(moves, decisions=(), start=ONE, trace=TRACE, seconds=1.0):
    """A PAT run that made `moves`: (seconds, live, source, target)."""
    switches = tuple(a_switch(at, s, t, live) for at, live, s, t in moves)
    ends = tuple(0.01 * n for n in sorted(trace.lengths))
    spans = [(start, 0.0, seconds), *((t, at, seconds) for at, _, _, t in moves)]
    return Run(
        PAT,
        trace.name,
        1,
        BEGAN,
        seconds,
        sum(trace.lengths),
        1.0,
        True,
        ends=ends,
        spans=tuple(spans),
        switches=switches,
        decisions=tuple(decisions),
    )


def test_the_simulator_is_set_to_the_measured_times():
    real = ScaledTruth(Crossover(), {ONE: 1.3, TWO: 0.8}, 2.0)
    traces = [TRACE, a_trace([20] * 8 + [60])]
    static = {
        layout: [
            simulate(trace, StayPolicy(layout), real, CAPACITY).generation_seconds
            for trace in traces
        ]
        for layout in (ONE, TWO)
    }
    simulator = calibrate_simulator(
        Crossover(),
        CAPACITY,
        traces,
        static,
        [a_switch(0.2, seconds=0.02), a_switch(1, seconds=0.02)],
    )
    assert simulator.factors == {ONE: pytest.approx(1.3), TWO: pytest.approx(0.8)}
    assert simulator.switch_factor == pytest.approx(2.0)
    for layout, seconds in static.items():
        found = [simulator.seconds(trace, StayPolicy(layout)) for trace in traces]
        assert found == pytest.approx(seconds, rel=0.01)


def test_the_simulator_is_set_where_requests_arrive_over_time():
    trace = a_trace([10, 10, 60], arrivals=[0.0, 1.0, 2.0])
    real = ScaledTruth(Crossover(), {ONE: 2.0, TWO: 2.0})
    static = {
        one: [simulate(trace, StayPolicy(one), real, CAPACITY).generation_seconds]
        for one in (ONE, TWO)
    }
    simulator = calibrate_simulator(Crossover(), CAPACITY, [trace], static)
    assert simulator.seconds(trace, StayPolicy(ONE)) == pytest.approx(static[ONE][0], rel=0.01)
    # Most of that time is waiting: what was off by 2 in the steps is off by less in all.
    assert 1.0 < simulator.factors[ONE] < 1.6


def test_a_good_switch_is_no_mistake():
    run = a_run([(0.11, 2, ONE, TWO)], [a_decision(0.11, stay=0.99, go=0.5)])
    judged = judge(TRACE, run, a_simulator())
    assert [one.why for one in judged.switches] == ["saving"]
    assert judged.switches[0].saved > 0.3
    assert judged.switches[0].predicted == pytest.approx(0.49)
    assert (judged.false_positives, judged.missed) == (0, False)
    assert judged.lost == judged.foregone == 0.0
    assert judged.clairvoyant == pytest.approx(judged.replayed, rel=0.05)
    best = clairvoyant(TRACE, (ONE, TWO), Crossover(), CAPACITY)
    assert (
        judged.schedule.startswith(f"{ONE} after 0 -> {TWO}") and judged.clairvoyant_switches == 1
    )
    assert judged.clairvoyant <= best.generation_seconds + 1e-9


def test_a_switch_that_loses_time_is_a_false_positive():
    # To one group while all are live, where steps take twice as long.
    trace = a_trace([100] * 14)
    decision = a_decision(0.2, live=14, stay=1.0, go=0.8)
    judged = judge(trace, a_run([(0.2, 14, ONE, TWO)], [decision], trace=trace), a_simulator())
    assert judged.false_positives == 1
    assert judged.switches[0].saved < -0.5
    assert judged.lost == pytest.approx(-judged.switches[0].saved)
    # The loss is not counted as foregone once more.
    assert judged.foregone == 0.0 and not judged.missed


def test_a_probe_is_not_called_a_false_positive():
    trace = a_trace([100] * 14)
    decision = a_decision(0.2, live=14, why="probe")
    judged = judge(trace, a_run([(0.2, 14, ONE, TWO)], [decision], trace=trace), a_simulator())
    assert judged.switches[0].saved < 0
    assert judged.false_positives == 0 and judged.lost == 0.0
    assert judged.probing == pytest.approx(-judged.switches[0].saved)


def test_a_probe_costs_its_stay_and_both_ways():
    trace = a_trace([100] * 14)
    moves = [(0.2, 14, ONE, TWO), (0.3, 14, TWO, ONE)]
    decisions = [
        a_decision(0.2, live=14, why="probe"),
        a_decision(0.3, TWO, ONE, live=14),
    ]
    judged = judge(trace, a_run(moves, decisions, trace=trace), a_simulator())
    # 0.1 s in which steps take twice as long, and two switches; nothing has ended meanwhile.
    assert judged.probing == pytest.approx(0.1 / 2 + 2 * 0.01, abs=0.03)
    assert judged.switches[1].saved > 0.3  # coming back was right
    assert (judged.false_positives, judged.missed) == (0, False)


def test_a_switch_that_was_not_made_is_missed():
    judged = judge(TRACE, a_run([]), a_simulator())
    assert judged.missed and judged.false_positives == 0
    assert judged.foregone == pytest.approx(judged.replayed - judged.clairvoyant)
    assert judged.foregone > MISSED_SHARE * judged.replayed


def test_a_late_switch_is_missed_if_it_costs_enough():
    # It would have paid from 0.1 s on, with 3 live.
    trace = a_trace([10] * 12 + [80, 100, 110])
    late = a_run([(0.85, 2, ONE, TWO)], [a_decision(0.85)], trace=trace)
    judged = judge(trace, late, a_simulator())
    assert judged.missed and judged.false_positives == 0
    assert judged.foregone == pytest.approx(70 * 0.005, rel=0.1)


def test_nothing_is_missed_where_switching_does_not_pay():
    trace = a_trace([90] * 12 + [100] * 2)
    judged = judge(trace, a_run([], trace=trace), a_simulator(Crossover(switch=5.0)))
    assert not judged.missed and judged.clairvoyant_switches == 0
    assert judged.clairvoyant == pytest.approx(judged.replayed)


# ---------------------------------------------------------------- what is measured, what is written


def some_settings(model, workloads="straggler,staggered", repeats=2, scale="tiny"):
    return BenchSettings(model, 2, choose(workloads), repeats, scale, seed=0)


def config_of(model):
    return json.loads((model / "config.json").read_text())


def test_sides_differ_in_nothing_but_pats_options(tmp_path):
    config = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64)
    settings_ = some_settings(tmp_path, "lognormal,uniform_long", scale="full")
    found = sides(settings_)
    assert list(found) == ["tp1dp2", "tp2dp1", PAT]
    assert list(sides(dataclasses.replace(settings_, ranks=4))) == [
        "tp1dp4",
        "tp2dp2",
        "tp4dp1",
        PAT,
    ]
    tp_of = {str(layout): layout.tp for layout in settings_.layouts}
    options = {name: engine_options(settings_, pat, config) for name, pat in found.items()}
    for name, one in options.items():
        parsed = PATConfig.parse(one.pop("additional_config")["pat"])
        if name == PAT:
            # Lengths are fixed by max_tokens, which the predictor must not see.
            assert parsed.policy == PredictorPolicyConfig(length_bound=MAX_TOKENS)
        else:
            assert parsed.policy == StaticPolicyConfig(kind="static", tp=tp_of[name])
            assert [str(layout) for layout in parsed.resolve_layouts(2)] == [name]
    assert options["tp1dp2"] == options["tp2dp1"] == options[PAT]
    longest = max(
        p + n
        for t in settings_.traces()
        for p, n in zip(t.num_prompt_tokens, t.lengths, strict=True)
    )
    assert options[PAT]["max_model_len"] == longest
    assert options[PAT]["max_num_seqs"] == 128
    with pytest.raises(ValueError, match="another --model or a smaller --scale"):
        engine_options(settings_, found[PAT], {**config, "max_position_embeddings": 300})


def test_stock_engines_run_as_many_requests():
    given = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 512}
    assert stock_limits(given, tp=1) == {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    assert stock_limits(given, tp=2) == {"max_num_seqs": 128, "max_num_batched_tokens": 8192}


def test_requests_are_those_of_the_trace():
    trace = dataclasses.replace(a_trace([5, 6, 7], arrivals=[0.0, 0.5, 0.5]), groups=(0, 1, 0))
    requests = requests_of(trace, vocab=300, seed=1)
    assert requests == requests_of(trace, vocab=300, seed=1)
    assert [(r.length, r.arrival, len(r.prompt)) for r in requests] == [
        (5, 0.0, 8),
        (6, 0.5, 8),
        (7, 0.5, 8),
    ]
    assert requests[0].prompt == requests[2].prompt != requests[1].prompt
    assert all(3 <= token < 300 for r in requests for token in r.prompt)
    assert requests_of(trace, vocab=300, seed=2)[0].prompt != requests[0].prompt


def a_profile():
    steps = [
        StepSample(
            layout=layout,
            batch=batch,
            context=batch * context,
            longest=context,
            busy=layout.replicas,
            seconds=seconds,
            low=seconds,
            high=seconds,
            repeats=3,
        )
        for layout in (ONE, TWO)
        for batch in (1, 2, 4, 8, 16)
        for context in (16, 64)
        for seconds in [0.004 + 0.001 * batch + 1e-6 * batch * context]
    ]
    return Profile(
        kind="measured",
        title="a made-up engine",
        created="2026-01-01",
        key={},
        ranks=2,
        layouts=(ONE, TWO),
        max_num_seqs={1: 16, 2: 32},
        max_batch_tokens={1: 512, 2: 1024},
        kv_tokens={1: 10_000, 2: 20_000},
        kv_bytes_per_token=64,
        steps=tuple(steps),
    )


def a_content(tmp_path):
    """Made-up runs of two workloads, through all that makes a file of them."""
    settings_ = some_settings(tmp_path)
    runs = []
    for workload in settings_.workloads:
        for repeat in range(settings_.repeats + 1):
            trace = settings_.trace(workload, repeat)
            for side, pace in (("tp1dp2", 0.010), ("tp2dp1", 0.012), (PAT, 0.008)):
                seconds = pace * max(trace.lengths) + max(trace.arrivals)
                moves = [(0.3 * seconds, 2, ONE, TWO)] if side == PAT else []
                decisions = [a_decision(0.3 * seconds, live=2)] if side == PAT else []
                run = a_run(moves, decisions, TWO if side == "tp2dp1" else ONE, trace, seconds)
                live = ((0.0, len(trace)), (seconds / 2, 2), (seconds, 0))
                runs.append(
                    dataclasses.replace(
                        run, side=side, repeat=repeat, live=live, steps={ONE: (20, pace)}
                    )
                )
    starts = {"tp1dp2": (9.0,), "tp2dp1": (9.5,), PAT: (20.0, 11.0)}
    measured = Measurements(tuple(runs), a_profile(), starts)
    judged = {
        one.name: judge_workload(settings_, one, measured, (ONE, TWO))
        for one in settings_.workloads
    }
    facts = {
        "date": "2026-01-02T03:04:05",
        "command": "python -m benchmarks.bench",
        "commit": "abc",
        "cpu": "a CPU",
        "cores": 2,
        "memory_gib": 8.0,
        "vllm": "0.32.0",
        "torch": "2.0",
    }
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 500}
    return content_of(settings_, facts, config, measured, judged)


def test_the_file_of_results_has_all_that_the_report_says(tmp_path):
    content = a_content(tmp_path)
    text = to_json(content)
    read = json.loads(text)
    assert markdown(read) == markdown(content)
    assert str(tmp_path) not in text
    straggler = read["workloads"][0]
    assert straggler["better_static"] == "tp1dp2"
    assert straggler["relative"][PAT]["mean"] == pytest.approx(0.8)
    assert straggler["relative"]["tp1dp2"]["mean"] == 1.0
    assert straggler["switches_per_batch"] == 1.0
    assert len(straggler["runs"]) == 9 and len(straggler["clairvoyant"]) == 2
    # The batch that warms up is in no figure but its own.
    assert straggler["seconds"][PAT]["repeats"] == 2
    assert straggler["cold"]["static"] == "tp1dp2"
    # Absolute times are nobody's business and mean nothing.
    switch = next(run for run in straggler["runs"] if run["side"] == PAT)["switches"][0]
    assert 0 < switch["at"] < 10 and switch["target"] == "tp2dp1"


def test_the_report_has_a_row_for_each_workload(tmp_path):
    text = markdown(a_content(tmp_path))
    for heading in (
        "Time of a batch",
        "Cold start",
        "Against a clairvoyant",
        "What the words mean",
    ):
        assert f"## {heading}" in text
    assert "| straggler | 4, " in text
    assert "**0.80 (0.80-0.80)**" in text
    widths = [line.count("|") for line in text.splitlines() if line.startswith("| straggler")]
    assert len(widths) == 4 and text.count("| staggered") == 4


def test_the_picture_is_drawn_from_the_file_alone(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(to_json(a_content(tmp_path)))
    plot_bench(json.loads(path.read_text()), tmp_path / "direct.png")
    image = tmp_path / "again.png"
    result = CliRunner().invoke(app, ["--replot", str(path), "--picture", str(image)])
    assert result.exit_code == 0, result.output
    assert image.read_bytes().startswith(PNG_SIGNATURE)
    assert image.read_bytes() == (tmp_path / "direct.png").read_bytes()
    path.write_text("{}")
    result = CliRunner().invoke(app, ["--replot", str(path)])
    assert result.exit_code == 2 and "no result of" in " ".join(result.output.split())


def test_lists_of_plain_values_take_one_line():
    content = {"a": [1, 2.5, "x, y"], "b": [[1, 2], [3, 4]], "c": [], "d": [{"e": None}]}
    text = to_json(content)
    assert json.loads(text) == content
    assert '"a": [1, 2.5, "x, y"]' in text
    assert to_json({"s": Summary(1.0, 0.5, 2.0, 3)}).count("repeats") == 1


def test_unknown_names_are_refused_before_anything_starts():
    result = CliRunner().invoke(app, ["--workloads", "nonsense"])
    assert result.exit_code == 2 and "nonsense" in result.output


# ---------------------------------------------------------------- real engines


@pytest.mark.slow
@pytest.mark.parametrize(
    "from_server",
    [
        pytest.param(True, id="sooner than for users"),
        pytest.param(False, id="as for users", marks=pytest.mark.nightly),
    ],
)
def test_bench_runs_real_engines(from_server, tmp_path, monkeypatch):
    if from_server:
        made_by = SimpleNamespace(get_context=lambda method: context())
        monkeypatch.setattr("benchmarks.engine_process.multiprocessing", made_by)
    before = engine_processes()
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["--model", str(random_model("qwen3")), "--scale", "tiny", "--repeats"]
    arguments += ["1", "--workloads", "staggered", "--output-dir", str(tmp_path)]
    groups: list[int] = []

    class Recorded(EngineProcess):
        def __init__(self, *options):
            super().__init__(*options)
            assert self._process.pid is not None
            groups.append(self._process.pid)

    monkeypatch.setattr("benchmarks.bench.run.EngineProcess", Recorded)
    result = CliRunner().invoke(app, [*arguments, "--picture", str(tmp_path / "picture.png")])
    assert result.exit_code == 0, result.output
    assert len(groups) == 2 + 1
    for group in groups:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
    _, alive = psutil.wait_procs(engine_processes(before), timeout=GONE_WITHIN)
    assert not alive
    (path,) = tmp_path.glob("*-bench.json")
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG_SIGNATURE)
    assert path.with_suffix(".md").read_text() == markdown(json.loads(path.read_text()))
    content = json.loads(path.read_text())
    (one,) = content["workloads"]
    traces = [WORKLOADS["staggered"].trace(repeat, 0.125) for repeat in (0, 1)]
    assert len(one["runs"]) == 2 * 3
    for run in one["runs"]:
        assert run["exact"]
        assert run["tokens"] == sum(traces[run["repeat"]].lengths)
        assert run["seconds"] > max(traces[run["repeat"]].arrivals)
    assert one["clairvoyant"][0]["measured"] > 0
    assert str(tmp_path) not in path.read_text()

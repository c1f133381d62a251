"""The benchmark: its workloads, its judgement of invented runs, and its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.bench.__main__ import app
from benchmarks.bench.calibrated import CalibratedSimulator
from benchmarks.bench.judgement import Judgement, judge
from benchmarks.bench.run import BenchSettings, engine_options, sides
from benchmarks.bench.runs import PAT, Run
from benchmarks.bench.serve import requests_of
from benchmarks.bench.workloads import MAX_TOKENS, WORKLOADS, choose, from_lengths
from pat_vllm.config import PATConfig, PredictorPolicyConfig, StaticPolicyConfig
from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import StepShape
from pat_vllm.reporting import DecisionReport, SwitchReport
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.traces import LengthTrace

ONE, TWO = Layout(1, 2), Layout(2, 1)
BEGAN = 100.0
"""When a run began, on the engine's clock."""


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_bounded_and_repeatable(name: str) -> None:
    workload = WORKLOADS[name]
    for scale in (1.0, 0.125):
        first = workload.trace(1, scale, seed=3)
        assert first == workload.trace(1, scale, seed=3)
        # Repeats and seeds draw new lengths, of as many requests.
        for other in (workload.trace(2, scale, seed=3), workload.trace(1, scale, seed=4)):
            assert len(other) == len(first)
            assert other.num_prompt_tokens != first.num_prompt_tokens
        assert max(first.lengths) <= first.max_tokens == MAX_TOKENS * scale
        assert (max(first.arrivals) > 0) == workload.waits


def test_workloads_are_chosen_by_name_or_from_a_file(tmp_path: Path) -> None:
    assert [workload.name for workload in choose(None)] == list(WORKLOADS)
    names = [workload.name for workload in choose("shift, lognormal,shift")]
    assert names == ["shift", "lognormal"]
    path = tmp_path / "earlier.json"
    path.write_text("[10, 20, 300]")
    trace = from_lengths(path, 40).trace(1)
    assert len(trace) == 40 and {*trace.lengths} == {10, 20, 300}
    path.write_text(f"[{MAX_TOKENS + 1}]")
    with pytest.raises(ValueError, match=r"earlier.json has a response of 321 tokens"):
        from_lengths(path, 40)
    for arguments, message in (
        (["--workloads", "nonsense"], "'nonsense' is unknown"),
        (["--workloads", "repeating", "--model", str(tmp_path)], "a model of its own"),
    ):
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert message in " ".join(done.output.replace("│", " ").split())


def switch_at(
    at: float, source: Layout = ONE, target: Layout = TWO, live: int = 2, **changed: Any
) -> SwitchReport:
    parts = ("states", "kv", "weights", "activate", "rpc", "finish", "plan", "quiesce")
    values: dict[str, Any] = dict.fromkeys(parts, 0.0) | {"reason": "policy", "seconds": 0.1}
    return SwitchReport(
        at=BEGAN + at,
        source=source,
        target=target,
        num_seqs=live,
        migrated=live,
        recomputed=0,
        kv_bytes=0,
        tokens=10 * live,
        weight_bytes=0,
        **values | changed,
    )


def decision_at(
    at: float, source: Layout = ONE, target: Layout = TWO, live: int = 2, why: str = "saving"
) -> DecisionReport:
    return DecisionReport(
        at=BEGAN + at,
        layout=source,
        target=target,
        num_seqs=live,
        stay=0.99,
        go=0.5,
        cost=0.1,
        fired=True,
        why=why,  # type: ignore[arg-type]
        step_before=0.10,
        step_after=0.05,
        real_before=0.08,
        real_after=0.10,
        real_cost=0.2,
    )


def trace_of(lengths: Sequence[int], arrivals: Sequence[float] | None = None) -> LengthTrace:
    n = len(lengths)
    at = (0.0,) * n if arrivals is None else tuple(arrivals)
    return LengthTrace("invented", tuple(lengths), at, tuple(range(n)), (8,) * n, 200)


# ---------------------------------------------------------------- against the clairvoyant


@dataclasses.dataclass(frozen=True)
class Crossover:
    """Steps of one group take half as long as replicas' with up to 4 requests, else twice."""

    switch: float = 0.01

    def step_seconds(self, layout: Layout, shape: StepShape, now: float, steps: int = 1) -> float:
        if layout == ONE:
            return 0.010
        return 0.005 if shape.batch <= 4 else 0.020

    def switch_seconds(self, source: Layout, target: Layout, live: Any, tokens: Any) -> Any:
        return 0.0 if source == target else self.switch


TAIL, EQUAL, LATE = ([10] * 12 + [100, 110]), [100] * 14, ([10] * 12 + [80, 100, 110])
CAPACITY = ReplicaCapacity(max_num_seqs=64)


def pat_run(
    trace: LengthTrace,
    moves: Sequence[tuple[float, int, Layout, Layout]] = (),
    why: str = "saving",
) -> Run:
    """A run with switches at `moves`: (seconds, live requests, source, target)."""
    return Run(
        side=PAT,
        workload=trace.name,
        repeat=1,
        began=BEGAN,
        seconds=1.0,
        tokens=sum(trace.lengths),
        response=1.0,
        exact=True,
        ends=tuple(0.01 * n for n in sorted(trace.lengths)),
        spans=((ONE, 0.0, 1.0), *((target, at, 1.0) for at, _, _, target in moves)),
        switches=tuple(switch_at(at, source, target, live) for at, live, source, target in moves),
        decisions=tuple(
            decision_at(at, source, target, live, why) for at, live, source, target in moves
        ),
    )


@pytest.mark.parametrize(
    ("lengths", "moves", "why", "wrong", "missed"),
    [
        pytest.param(TAIL, [(0.11, 2, ONE, TWO)], "saving", False, False, id="good"),
        # To one group while all are live, where steps take twice as long.
        pytest.param(EQUAL, [(0.2, 14, ONE, TWO)], "saving", True, False, id="a loss"),
        pytest.param(EQUAL, [(0.2, 14, ONE, TWO)], "probe", False, False, id="a probe"),
        pytest.param(TAIL, [], "", False, True, id="not switched"),
        # It would have paid from 0.1 s on, with 3 live.
        pytest.param(LATE, [(0.85, 2, ONE, TWO)], "saving", False, True, id="late"),
        pytest.param([90] * 14, [], "", False, False, id="does not pay"),
    ],
)
def test_judgement(
    lengths: list[int],
    moves: list[tuple[float, int, Layout, Layout]],
    why: str,
    wrong: bool,
    missed: bool,
) -> None:
    trace = trace_of(lengths)
    factors = {ONE: 1.0, TWO: 1.0}
    simulator = CalibratedSimulator(Crossover(), CAPACITY, (ONE, TWO), factors)
    result: Judgement = judge(trace, pat_run(trace, moves, why), simulator)
    saved = [switch.saved for switch in result.switches]
    assert (result.false_positives, result.missed) == (wrong, missed)
    assert result.lost == pytest.approx(-saved[0] if wrong else 0)
    assert result.probing == pytest.approx(-saved[0] if why == "probe" else 0)
    # A loss is not counted as foregone once more.
    assert (result.foregone > 0) == missed
    assert result.clairvoyant <= result.replayed + 1e-9
    if not moves:
        assert result.foregone == pytest.approx(result.replayed - result.clairvoyant)
    if lengths is LATE:
        assert result.foregone == pytest.approx(70 * 0.005, rel=0.1)
    if lengths is TAIL and moves:
        assert saved[0] > 0.3 and result.switches[0].predicted == pytest.approx(0.49)
        assert result.schedule.startswith(f"{ONE} after 0 -> {TWO}")


# ---------------------------------------------------------------- what is measured


def test_sides_differ_in_nothing_but_pats_options(tmp_path: Path) -> None:
    config = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64)
    workloads = choose("lognormal,uniform_long")
    asked = BenchSettings(tmp_path, 2, workloads, repeats=2, scale="tiny", seed=0)
    named = sides(asked)
    assert list(named) == ["tp1dp2", "tp2dp1", PAT]
    options = {name: engine_options(asked, pat, config) for name, pat in named.items()}
    for name, of_side in options.items():
        parsed = PATConfig.parse(of_side.pop("additional_config")["pat"])
        if name == PAT:
            # Lengths are fixed by max_tokens, which the predictor must not see.
            assert parsed.policy == PredictorPolicyConfig(length_bound=MAX_TOKENS // 8)
        else:
            assert parsed.policy == StaticPolicyConfig(kind="static", tp=Layout.parse(name).tp)
            assert [str(layout) for layout in parsed.resolve_layouts(2)] == [name]
    assert options["tp1dp2"] == options["tp2dp1"] == options[PAT]
    longest = max(
        p + n for t in asked.traces() for p, n in zip(t.num_prompt_tokens, t.lengths, strict=True)
    )
    assert options[PAT]["max_model_len"] == longest
    trace = dataclasses.replace(trace_of([5, 6, 7], arrivals=[0.0, 0.5, 0.5]), groups=(0, 1, 0))
    requests = requests_of(trace, vocab=300, seed=1)
    assert [(r.length, r.arrival) for r in requests] == [(5, 0.0), (6, 0.5), (7, 0.5)]
    assert requests[0].prompt == requests[2].prompt != requests[1].prompt

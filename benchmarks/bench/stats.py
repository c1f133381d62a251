"""What the benchmark's runs say: paired ratios, their uncertainty, and an oracle's judgement. Pure.

The oracle's part is simulated: it replays the very batches on the engine's own profile, whose step
times are scaled until the static layouts take as long as they really took.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.paper.oracle import oracle
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import Policy, StayPolicy
from pat_vllm.predictor.state import LiveState
from pat_vllm.reporting import DecisionReport, SwitchReport
from pat_vllm.simulator.engine import Limits
from pat_vllm.simulator.replay import simulate
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import ScaledTruth, Truth

PAT = "PAT"
"""Name of the adaptive side."""

MISSED_SHARE = 0.03
"""Of a batch's time; a switch that would have saved less is not called missed."""
_RESAMPLES = 10_000


@dataclass(frozen=True)
class Run:
    """One batch on one side. Times in seconds, from the first submit on.

    Attributes:
        side: a static layout's name, or `PAT`.
        repeat: 0 is the first batch of a fresh engine.
        seconds: until the last output.
        response: mean over requests, from arrival to last token.
        exact: every request got exactly its number of tokens.
        live: (at, live requests from then on).
        spans: (layout, start, end), one after the other.
        ends: when each request ended, ascending.
        switches: while requests were running or expected, so that one may be a way home between
            them; `at` is absolute, as in `decisions`.
        began: on the machine's monotonic clock.
        steps: by layout: steps, and their mean seconds.
        step_error: by layout: predicted steps, and their mean absolute relative error.
        plans, planning: how often the policy planned, and seconds in all.
    """

    side: str
    workload: str
    repeat: int
    began: float
    seconds: float
    tokens: int
    response: float
    exact: bool
    ends: tuple[float, ...] = ()
    live: tuple[tuple[float, int], ...] = ()
    spans: tuple[tuple[Layout, float, float], ...] = ()
    switches: tuple[SwitchReport, ...] = ()
    decisions: tuple[DecisionReport, ...] = ()
    steps: Mapping[Layout, tuple[int, float]] | None = None
    step_error: Mapping[Layout, tuple[int, float]] | None = None
    plans: int = 0
    planning: float = 0.0

    @property
    def switched(self) -> int:
        """Switches that carried requests."""
        return sum(switch.reason != "idle" for switch in self.switches)


# -------------------------------------------------------------------- paired ratios


@dataclass(frozen=True)
class Ratio:
    """A ratio of paired repeats.

    Attributes:
        mean: geometric mean of the repeats' ratios.
        low, high: its bootstrap 95% confidence interval.
        values: of the repeats.
    """

    mean: float
    low: float
    high: float
    values: tuple[float, ...]

    def show(self) -> str:
        """Like `0.91 (0.88-0.94)`."""
        return f"{self.mean:.2f} ({self.low:.2f}-{self.high:.2f})"


def paired_ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio:
    """Ours over theirs, repeat by repeat: what both had in common cancels out.

    The interval is the percentile bootstrap's, over repeats; of a single one it has no width.

    Raises:
        ValueError: there are no repeats, or not equally many.
    """
    logs = np.array([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    if not len(logs):
        raise ValueError("a ratio needs at least one repeat")
    picks = np.random.default_rng(seed).integers(len(logs), size=(_RESAMPLES, len(logs)))
    means = logs[picks].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    values = tuple(float(value) for value in np.exp(logs))
    return Ratio(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)), values)


def better_static(seconds: Mapping[str, Sequence[float]]) -> str:
    """The static side with the lowest median time over repeats."""
    return min(seconds, key=lambda side: statistics.median(seconds[side]))


def best_of_each(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """The fastest static side's time of each repeat, whichever it was."""
    return [min(repeat) for repeat in zip(*seconds.values(), strict=True)]


# -------------------------------------------------------------------- predictions


@dataclass(frozen=True)
class PredictionError:
    """How far predictions were off, as mean absolute relative errors; None without any.

    Attributes:
        steps: of decode steps, each predicted before it was learnt from, by layout's name.
        before, after: of the step time before and after a switch, when it was decided.
        cost: of the switches' summed seconds, steps in flight that they wait for included.
        saving: predicted seconds that the switches decided on would save, summed up.
    """

    steps: Mapping[str, float]
    before: float | None
    after: float | None
    cost: float | None
    saving: float


def prediction_error(runs: Sequence[Run]) -> PredictionError:
    """Over the PAT runs of a workload."""
    sums: dict[str, tuple[int, float]] = {}
    for run in runs:
        for layout, (count, mean) in (run.step_error or {}).items():
            n, total = sums.get(str(layout), (0, 0.0))
            sums[str(layout)] = (n + count, total + count * mean)
    fired = [d for run in runs for d in run.decisions if d.fired]
    made = [s for run in runs for s in run.switches if s.reason == "policy"]

    def error(pairs: Sequence[tuple[float, float | None]]) -> float | None:
        errors = [abs(predicted / real - 1) for predicted, real in pairs if real]
        return statistics.mean(errors) if errors else None

    return PredictionError(
        steps={name: total / n for name, (n, total) in sorted(sums.items()) if n},
        before=error([(d.step_before, d.real_before) for d in fired]),
        after=error([(d.step_after, d.real_after) for d in fired]),
        # Single waits for steps in flight are a matter of luck: the sums are compared.
        cost=error([(sum(d.cost for d in fired), sum(s.seconds for s in made))]),
        saving=sum(d.saving for d in fired if d.why == "saving"),
    )


# -------------------------------------------------------------------- against the oracle


@dataclass(frozen=True)
class Move:
    """A switch that was made: when, after how many ended responses, and where to."""

    at: float
    ended: int
    target: Layout


class Replay(Policy):
    """Makes given moves: after as many ended responses as then; but at the time where requests
    arrive over time, and as long after the move before where that was short, as after a probe."""

    def __init__(self, start: Layout, moves: Sequence[Move], by_time: bool) -> None:
        self.home = start
        self._moves = moves
        self._by_time = by_time
        self._ended = 0
        self._made: list[float] = []
        """When each move so far was made, on the simulator's clock."""

    def choose(self, state: LiveState) -> Layout:
        while len(self._made) < len(self._moves) and self._due(state.now):
            self._made.append(state.now)
        return self._moves[len(self._made) - 1].target if self._made else self.home

    def _due(self, now: float) -> bool:
        number = len(self._made)
        move = self._moves[number]
        if self._by_time:
            return now >= move.at
        if number:
            gap = move.at - self._moves[number - 1].at
            if gap < _SHORT_STAY:
                return now >= self._made[-1] + gap
        return self._ended >= move.ended

    def finished(self, now: float, group: int, num_output_tokens: int, complete: bool) -> None:
        self._ended += 1


_SHORT_STAY = 1.0
"""Seconds in which too few responses end to tell how long it was."""


def moves_of(run: Run) -> tuple[Move, ...]:
    """The moves of a run."""
    moves = []
    for switch in run.switches:
        at = switch.at - run.began
        ended = bisect.bisect_right(run.ends, at)
        moves.append(Move(at, ended, switch.target))
    return tuple(moves)


@dataclass(frozen=True)
class Simulator:
    """The simulator, set to the measured times of a workload.

    Attributes:
        factors: measured over simulated time of the static layouts, by tp, before it was set.
        switch_factor: measured over predicted seconds of PAT's switches.
    """

    truth: Truth
    limits: Limits
    layouts: tuple[Layout, ...]
    factors: Mapping[int, float]
    switch_factor: float = 1.0

    def seconds(self, trace: LengthTrace, policy: Policy) -> float:
        """Until the last response."""
        run = simulate(trace, policy, self.truth, self.limits, chunk=_FEW_STEPS)
        return run.generation_seconds


_FEW_STEPS = 4
"""Simulated at once, so that a short stay in a layout is as short as it was."""


def set_simulator(
    profiled: Truth,
    limits: Limits,
    traces: Sequence[LengthTrace],
    static: Mapping[Layout, Sequence[float]],
    switches: Sequence[SwitchReport] = (),
) -> Simulator:
    """Scale step times by layout so that static batches take as long as measured.

    Args:
        profiled: durations as the engine's profile has them.
        static: by layout, measured seconds of each trace.
        switches: measured ones, of whose stalls the simulator's are made the equal.
    """
    predicted = sum(
        profiled.switch_seconds(s.source, s.target, s.num_seqs, s.tokens) for s in switches
    )
    real = sum(s.seconds - s.quiesce for s in switches)
    switch_factor = real / predicted if predicted > 0 and real > 0 else 1.0
    factors: dict[int, float] = {}
    scale: dict[int, float] = {}
    for layout, measured in static.items():

        def share(
            factor: float, layout: Layout = layout, measured: Sequence[float] = measured
        ) -> float:
            """Simulated over measured time, were all steps `factor` times as long."""
            truth = ScaledTruth(profiled, {layout.tp: factor})
            seconds = [
                simulate(trace, StayPolicy(layout), truth, limits).generation_seconds
                for trace in traces
            ]
            return statistics.median(s / r for s, r in zip(seconds, measured, strict=True))

        plain = share(1.0)
        factors[layout.tp] = 1 / plain
        scale[layout.tp] = _root(share, 1.0, plain)
    truth = ScaledTruth(profiled, scale, switch_factor)
    return Simulator(truth, limits, tuple(static), factors, switch_factor)


def _root(share: Callable[[float], float], factor: float, value: float) -> float:
    """The factor at which `share` is 1, by the secant method: it grows with the factor, but not
    in proportion where an engine also waits for requests."""
    before, slope = factor, value / factor
    for _ in range(_ROUNDS):
        if abs(value - 1) < _CLOSE:
            break
        factor = min(4 * before, max(before / 4, before + (1 - value) / slope))
        now = share(factor)
        if factor != before:
            slope = max((now - value) / (factor - before), 0.05 * slope)
        before, value = factor, now
    return factor


_ROUNDS = 8
_CLOSE = 0.001


@dataclass(frozen=True)
class JudgedSwitch:
    """A fired decision: seconds it was to save, and seconds that it saved by the simulator with
    the true lengths; negative is lost. None for what was no attempt to save (a probe)."""

    why: str
    live: int
    source: str
    target: str
    predicted: float
    saved: float

    @property
    def false(self) -> bool:
        """Whether it was made to save time and lost some."""
        return self.why == "saving" and self.saved < 0


@dataclass(frozen=True)
class Judgement:
    """One PAT batch beside the oracle's. Seconds are simulated but for `measured`.

    Attributes:
        measured: PAT's.
        replayed: PAT's switches, replayed.
        oracle: the best plan's.
        plan: the best plan.
        switches: fired decisions, oldest first.
        lost: by switches that were false positives.
        foregone: by switches that were not made, or late, where that is above 3% of the batch.
        probing: by probes, each with the way back that followed it.
    """

    repeat: int
    measured: float
    replayed: float
    oracle: float
    plan: str
    oracle_switches: int
    switches: tuple[JudgedSwitch, ...]
    lost: float
    foregone: float
    probing: float = 0.0

    @property
    def false_positives(self) -> int:
        """Switches that were made to save time and lost some."""
        return sum(switch.false for switch in self.switches)

    @property
    def missed(self) -> bool:
        """Whether a switch that pays was not made, or late."""
        return self.foregone > 0

    @property
    def simulator_error(self) -> float:
        """Simulated over measured time of the PAT batch, less 1."""
        return self.replayed / self.measured - 1


def judge(trace: LengthTrace, run: Run, simulator: Simulator) -> Judgement:
    """Compare a PAT run with the best plan for its trace.

    A switch's saving is the time without it and those after it, less the time with all of them:
    what the policy predicted, which plans later switches along.
    """
    by_time = any(trace.arrivals)
    start = run.spans[0][0]
    moves = moves_of(run)

    def seconds(made: Sequence[Move]) -> float:
        return simulator.seconds(trace, Replay(start, made, by_time))

    replayed = seconds(moves)
    judged = []
    for index, switch in enumerate(run.switches):
        decision = _decision_of(switch, run.decisions)
        judged.append(
            JudgedSwitch(
                why=decision.why if decision else switch.reason,
                live=switch.num_seqs,
                source=str(switch.source),
                target=str(switch.target),
                predicted=decision.saving if decision else math.nan,
                saved=seconds(moves[:index]) - replayed,
            )
        )
    probing = 0.0
    for index, one in enumerate(judged):
        if one.why == "probe":
            back = index + 1 < len(judged) and judged[index + 1].target == one.source
            without = (*moves[:index], *moves[index + 1 + back :])
            probing += replayed - seconds(without)
    plan, best = oracle(trace, simulator.layouts, simulator.truth, simulator.limits)
    # What the oracle's search did not find is no loss of PAT's.
    ideal = min(best.generation_seconds, replayed)
    lost = max([-one.saved for one in judged if one.false], default=0.0)
    foregone = replayed - ideal - lost - max(0.0, probing)
    wanted = [plan.start, *(layout for _, layout in plan.switches)]
    if foregone <= MISSED_SHARE * replayed or not _late(wanted, plan.switches, start, moves):
        foregone = 0.0
    return Judgement(
        repeat=run.repeat,
        measured=run.seconds,
        replayed=replayed,
        oracle=ideal,
        plan=str(plan),
        oracle_switches=len(plan.switches),
        switches=tuple(judged),
        lost=lost,
        foregone=foregone,
        probing=probing,
    )


def _late(
    wanted: Sequence[Layout],
    switches: Sequence[tuple[int, Layout]],
    start: Layout,
    moves: Sequence[Move],
) -> bool:
    """Whether some layout of the oracle's plan was entered later by PAT, or never."""
    when = [(0, wanted[0]), *switches]
    entered = [(0, start), *((move.ended, move.target) for move in moves)]
    position = 0
    for ended, layout in when:
        found = next((i for i in range(position, len(entered)) if entered[i][1] == layout), None)
        if found is None or entered[found][0] > ended:
            return True
        position = found
    return False


def _decision_of(
    switch: SwitchReport, decisions: Sequence[DecisionReport]
) -> DecisionReport | None:
    """The decision that led to a switch: the last fired one before it, with its target."""
    fired = [d for d in decisions if d.fired and d.at <= switch.at + 1e-3]
    if fired and fired[-1].target == switch.target:
        return fired[-1]
    return None
